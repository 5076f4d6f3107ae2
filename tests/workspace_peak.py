"""What steps take at most, by torch's own account of the CPU's allocator."""

import torch
from torch.profiler import ProfilerActivity, profile


def peak_of(work) -> int:
    """Most bytes that the CPU's allocator gave `work` at once, by torch's own account."""
    with (
        torch.inference_mode(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p,
    ):
        work()
    events = p.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    live = peak = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return peak


def measured(engine, tokens, context):
    """Bytes of the last chunk of a full sequence, and of one decode step in its last place."""
    prompt = [(7 * i) % 120 + 3 for i in range(context)]
    engine.generate(prompt[:2], max_new_tokens=1, room=context)
    sequence = engine.sequence
    with torch.inference_mode():
        sequence.restart()
        *begin, last = torch.tensor([prompt]).tensor_split([context - tokens], dim=1)
        for chunk in begin:
            if chunk.shape[1]:
                sequence.prefill(chunk)
    chunk_bytes = peak_of(lambda: sequence.prefill(last))
    with torch.inference_mode():
        sequence.restart()
        sequence.prefill(last[:, :3])
    return chunk_bytes, peak_of(lambda: sequence.decode(last[:, :1]))
