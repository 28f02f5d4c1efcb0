"""`residua`, `python -m residua` and `torchrun -m residua`: the command line."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C before it has begun is an exit code, as it is later."""
    try:
        from residua.cli import main as run

        run()
    except KeyboardInterrupt:
        print("residua: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
