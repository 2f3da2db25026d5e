"""`python -m paceline`: the same as the `paceline` command."""

import sys

from paceline.cli.main import main

sys.exit(main())
