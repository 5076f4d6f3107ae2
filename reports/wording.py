"""What a page says in sentences: the question, the answer, the machine, and what to beware of."""

from __future__ import annotations

from collections import Counter

from residency.reports.contests import FOLDER, Contest, Entrant, label_of, without
from residency.reports.effects import telling
from residency.reports.measures import BENCH, DECODE, MODES, TTFT
from residency.reports.reading import ResultSet, State
from residency.reports.report import Section
from residency.reports.results import GAUGES
from residency.reports.units import size
from residency.reports.winners import named

MACHINE = (
    *("device_name", "device", "device_memory", "cpus", "threads", "host_memory", "cuda"),
    *("residency", "commit", "torch", "transformers", "python"),
)
MOST_VALUES = 12
BELOW_FLOOR = 0.95
MOST_DRIFT = 1.15  # between jobs, of what should be alike


def question(contest: Contest) -> list[str]:
    """What was varied, on which model, under which work."""
    varied = contest.varied
    number = len(contest.entrants)
    parts = [f"{key} ({', '.join(_some(values))})" for key, values in varied.items()]
    if number == 1:
        asked = f"One configuration was measured: {_whole(contest)}."
    elif parts:
        asked = f"Which of {number} configurations is fastest? Varied: {' x '.join(parts)}."
    else:
        asked = f"{number} results of one configuration: {_whole(contest)}."
    return [asked, f"Model: {_model(contest)}.", f"Work: {_work(contest)}."]


def _whole(contest: Contest) -> str:
    entrant = contest.entrants[0]
    return f"{entrant.result.title} (job {entrant.number})"


def _some(values: list[str]) -> list[str]:
    more = len(values) - MOST_VALUES
    return [*values[:MOST_VALUES], f"{more} more"] if more > 0 else values


def _model(contest: Contest) -> str:
    setting, result = contest.setting, contest.result
    keys = [
        f"{key.partition('.')[2]}={value}"
        for key, value in setting.items()
        if key.startswith("model.") and value not in ("", "auto", "0")
    ]
    said = f"{result.model} ({', '.join(keys)})" if keys else result.model
    experts = result.num_experts
    if experts:
        banks = size(result.memory["bank_bytes"])
        said += f", {experts:,} experts in all layers, {banks} in host memory"
    return said


def _work(contest: Contest) -> str:
    result, setting = contest.result, contest.setting
    lengths = sorted({at.tokens for at in contest.points if at.quantity == TTFT})
    runs = sorted({m.num_runs for e in contest.entrants for m in e.measures.values()})
    words = [f"prompts of {', '.join(f'{n:,}' for n in lengths)} tokens"] if lengths else []
    if result.kind == BENCH and result.plan.get("pool"):
        words[-1:] = [f"{words[-1]} into {result.plan['pool']} slots"] if words else []
    if result.kind in (BENCH, MODES) and result.plan.get("decode_tokens"):
        batch = result.plan.get("batch", 1)
        each = "" if batch == 1 else f" of {batch} sequences together"
        words.append(
            f"decode of {result.plan['decode_tokens']} tokens{each} behind "
            f"{result.plan.get('decode_context', '?')}"
        )
    elif any(at.quantity == DECODE for at in contest.points):
        words.append(f"decode of up to {setting.get('workload.max_new_tokens', '?')} tokens")
    many = "a single run" if runs == [1] else f"{' or '.join(map(str, runs))} timed runs of each"
    return "; ".join([*words, many])


def warnings(contest: Contest) -> list[str]:
    """What must be known before any number is read."""
    found = []
    results = contest.results
    if any(result.made_up for result in results):
        found.append("The weights are made up: times are those of the shape, texts mean nothing.")
    if said := {result.routing for result in results if result.routing}:
        found.append(
            f"The routes are made up or replaced ({', '.join(sorted(said))}): hit rates are those "
            "of these routes, not of a model's own."
        )
    elif any(result.made_up for result in results):
        found.append("The routers are made up too: hit rates say nothing about a trained model.")
    if all(m.num_runs < 2 for each in contest.entrants for m in each.measures.values()):
        found.append("Every time is of a single run: nothing is known of the noise.")
    elif all(m.num_runs <= 2 for each in contest.entrants for m in each.measures.values()):
        found.append(
            "Two timed runs each: chance alone parts the ranges of equal configurations in one "
            "comparison of three, so a verdict at one length alone means little."
        )
    for name in MACHINE:
        values = dict.fromkeys(result.environment.get(name, "not told") for result in results)
        if len(values) > 1:
            found.append(f"These results differ in {name}: {', '.join(values)}.")
    for name in GAUGES:
        told = [result.gauges[name] for result in results if name in result.gauges]
        if told and max(told) > min(told) * MOST_DRIFT:
            found.append(
                f"{name[0].upper()}{name[1:]}, which the configuration has no part in, differs "
                f"{max(told) / min(told):.1f}-fold between these jobs: the machine's speed changed "
                "under way, so differences below that may be the machine's."
            )
    floors = [
        measure.median / measure.floor_s
        for each in contest.entrants
        for measure in each.measures.values()
        if measure.floor_s is not None
    ]
    below = sum(over < BELOW_FLOOR for over in floors)
    if below:
        found.append(
            f"{below} of {len(floors)} medians lie more than {1 - BELOW_FLOOR:.0%} below their "
            "floor, which was measured in the same process: the machine was not quiet, or its "
            "speed drifted, so small differences mean nothing."
        )
    return found


def effects_text(section: Section) -> list[str]:
    """Which choices matter by themselves, where there is more than one."""
    return telling(section.effects) if len(section.contest.varied) > 1 else []


def answer(section: Section) -> str:
    """The recommendation in one sentence."""
    contest, advice = section.contest, section.advice
    if len(contest.entrants) == 1:
        return "One configuration alone: there is no other here to choose."
    if set(contest.varied) <= {FOLDER}:
        return (
            f"All {len(contest.entrants)} results are of one configuration, so there is none to "
            "choose; the tables show how far they lie apart."
        )
    if advice is None:
        return (
            "No point was timed under all configurations, so none is recommended; see who wins "
            "where."
        )
    label, number = _choice(advice.entrant), f"job {advice.entrant.number}"
    if not advice.judged:
        return (
            f"{label} ({number}) has the lowest times, but each is of a single run: "
            "repeat the runs before you rely on it."
        )
    if all(len(place.level) == len(place.ranking) - 1 for place in section.places):
        return (
            f"No configuration is better than another beyond noise; {label} "
            f"({number}) has the lowest medians."
        )
    return f"Use {label} ({number}): {advice.because}."


def _choice(entrant: Entrant) -> str:
    """What can be chosen of it: the folder's name is none of that."""
    return label_of(without(entrant.choice, [FOLDER])) or entrant.label


def others(section: Section) -> list[str]:
    """When another configuration is the better choice."""
    return list(section.advice.others) if section.advice else []


def reasons(section: Section) -> list[str]:
    advice = section.advice
    if advice is not None:
        return list(advice.reasons)
    found = []
    for place in section.places:
        if len(section.contest.entrants) == 1 or not place.ranking:
            continue
        found.append(f"{place.at.text}: the lowest median is that of {named(place.best)}.")
    return found


def unfinished(found: ResultSet) -> list[str]:
    """What to beware of where an answer is of a part alone."""
    missing = sum(job.state is not State.DONE for job in found.jobs)
    if not missing:
        return []
    whole = len(found.jobs)
    return [
        f"{missing} of {whole} jobs have no result (see below), so each answer is among the "
        f"{whole - missing} that were measured."
    ]


def machine(contest: Contest) -> list[tuple[str, str]]:
    """Of the first result, in a reader's order; whatever else it tells behind."""
    told = contest.result.environment
    names = [*(name for name in MACHINE if name in told), *(n for n in told if n not in MACHINE)]
    return [(name, told[name]) for name in names]


def progress(found: ResultSet) -> str:
    """How much of what was asked for is there."""
    counts = Counter(job.state for job in found.jobs)
    words = [f"{counts[state]} {state}" for state in State if counts[state]]
    words += [f"{len(found.skipped)} skipped"] if found.skipped else []
    words += [f"{len(found.duplicates)} the same as another"] if found.duplicates else []
    return f"{', '.join(words)}." if words else ""
