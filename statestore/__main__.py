"""``python -m statestore``: the store as a daemon."""

from shuffle.support.process_memory import keep_small

keep_small()

from shuffle.statestore.server.daemon import main  # noqa: E402 (what it imports is what has to be kept small)

raise SystemExit(main())
