"""`python -m meshstep` is the command `meshstep`."""

from .cli import main

raise SystemExit(main())
