from __future__ import annotations

from tests.sim import product

product.install()

from tests.sim.cli import main  # noqa: E402

if __name__ == "__main__":
    raise SystemExit(main())
