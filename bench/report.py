"""Tables of results. `python -m bench.report A.json B.json ...` shows the spread over repeated runs."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from .peers import AIMS, BASELINES

Peers = dict[str, dict]  # what run.py found for each peer of one workload


def row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def head(*titles: str) -> list[str]:
    return [row(titles), row("---" for _ in titles)]


def ratio(peers: Peers, name: str, baseline: str) -> float | None:
    """Median over the rounds of time of `name` / time of `baseline`; None if one of them did not run."""
    over, under = (peers.get(key, {}).get("rounds_ms") for key in (name, baseline))
    return median(a / b for a, b in zip(over, under)) if over and under else None


def shown(value: float | None, form: str = ".2f") -> str:
    return "" if value is None else format(value, form)


def table(workload: str, peers: Peers) -> str:
    """One workload as a Markdown table. A ratio below 1 is faster than the baseline."""
    titles = ["peer", "ms", "p25-p75", *(f"/ {title}" for title in BASELINES.values())]
    titles += ["first s", "MiB sent", "peak MiB", "loss", "vs single"]
    lines = [f"### {workload}", "", *head(*titles)]
    one = peers.get("single", {}).get("loss")
    for name, result in peers.items():
        if "skipped" in result:
            lines.append(row([name, result["skipped"], *[""] * (len(titles) - 2)]))
            continue
        against = (shown(ratio(peers, name, baseline)) for baseline in BASELINES)
        difference = None if one is None else result["loss"] - one
        lines.append(
            row(
                [
                    name,
                    shown(result["median_ms"]),
                    f"{result['p25_ms']:.1f}-{result['p75_ms']:.1f}",
                    *against,
                    shown(result["first_s"], ".1f"),
                    shown(result["sent_mib"]),
                    shown(result["peak_mib"], ".0f"),
                    shown(result["loss"], ".6f"),
                    shown(difference, "+.1e"),
                ]
            )
        )
    return "\n".join(lines) + "\n"


def best(peers: Peers, *, ours: bool) -> str | None:
    """The fastest of our contestants, or of the others that run on all ranks."""
    found = {
        name: result["median_ms"]
        for name, result in peers.items()
        if "median_ms" in result and name.startswith("meshstep") is ours and not name.startswith("single")
    }
    return min(found, key=found.__getitem__) if found else None


def verdict(workloads: dict[str, Peers]) -> str:
    """For each workload the best that we have against the best that others have."""
    lines = ["### the best of each, ratio of medians of interleaved steps", ""]
    lines += head("workload", "ours", "theirs", "ms", "ms", "ratio")
    for workload, peers in workloads.items():
        ours, theirs = best(peers, ours=True), best(peers, ours=False)
        if ours is None or theirs is None:
            continue
        times = (shown(peers[name]["median_ms"], ".1f") for name in (ours, theirs))
        lines.append(row([workload, ours.removeprefix("meshstep_"), theirs, *times, shown(ratio(peers, ours, theirs))]))
    return "\n".join(lines) + "\n"


def ratios(workloads: dict[str, Peers]) -> str:
    """What the project aims at: each of its peers against the baseline that it should not be slower than."""
    titles = (f"{name} / {BASELINES[baseline]}" for name, baseline in AIMS.items())
    lines = ["### step time, ratio (1.00 or less is the aim)", "", *head("workload", *titles)]
    for workload, peers in workloads.items():
        lines.append(row([workload, *(shown(ratio(peers, *aim)) for aim in AIMS.items())]))
    return "\n".join(lines) + "\n"


def spread(files: list[str]) -> str:
    """Over several runs: the median of what each run found, with the least and the most."""
    runs = [json.loads(Path(file).read_text())["workloads"] for file in files]
    verdicts = "\n".join(verdict(run) for run in runs)
    titles = (f"/ {title} (min-max)" for title in BASELINES.values())
    lines = head("workload", "peer", "runs", "ms (min-max)", *titles)
    for workload, name in {(w, name): None for run in runs for w in run for name in run[w]}:
        found = [run[workload] for run in runs if "median_ms" in run.get(workload, {}).get(name, {})]
        if not found:
            continue
        times = [peers[name]["median_ms"] for peers in found]
        against = ([ratio(peers, name, baseline) for peers in found] for baseline in BASELINES)
        lines.append(row([workload, name, len(found), span(times), *map(span, against)]))
    return "\n".join([*lines, "", verdicts])


def span(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{median(known):.2f} ({min(known):.2f}-{max(known):.2f})" if known else ""


if __name__ == "__main__":
    print(spread(sys.argv[1:]))
