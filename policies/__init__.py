"""What decides: cache policies, prefill modes and decode targets. Imports torch only."""
