"""``python -m koila_rl`` is ``koila-rl``."""

from __future__ import annotations

import sys

from koila_rl.cli import main

sys.exit(main())
