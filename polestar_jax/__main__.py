"""`python -m polestar_jax` is the `polestar` command."""

import sys

from polestar_jax.cli import main

sys.exit(main())
