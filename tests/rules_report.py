"""`python tests/rules_report.py`: coverage of the rules, with the validator's word on every sample (`make rules`)."""

from __future__ import annotations

import argparse
import warnings

from rules_samples import samples
from rules_stand_ins import STAND_INS, stand_in_samples

from meshstep.rules.report import coverage


def main() -> None:
    """Print the report; the exit status is 1 if a rule is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    warnings.simplefilter("ignore")
    found = coverage(samples() | stand_in_samples(), parser.parse_args().ranks, STAND_INS)
    print(found)
    raise SystemExit(1 if found.findings else 0)


if __name__ == "__main__":
    main()
