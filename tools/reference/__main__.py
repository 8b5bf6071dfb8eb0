"""``python -m tools.reference``: bring the pages of docs/reference up to date with the code."""

from __future__ import annotations

import argparse
import sys

from tools.reference import pages


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.reference", description="Make the reference anew.")
    parser.add_argument("--check", action="store_true", help="change nothing; end with 1 if something would change")
    options = parser.parse_args()
    stale = [path for path, text in pages.made().items() if path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{'stale' if options.check else 'written'}: {path.relative_to(pages.ROOT)}")
        if not options.check:
            path.write_text(pages.made_page(path), encoding="utf-8")
    if not stale:
        print("the reference is up to date")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
