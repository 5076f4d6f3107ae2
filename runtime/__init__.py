"""What moves and computes: banks, slots, transfers, engine, report. Knows policies by interface."""
