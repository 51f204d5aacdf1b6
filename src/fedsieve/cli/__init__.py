"""The way in: the `fedsieve` command."""

from __future__ import annotations

import logging
import sys

INTERRUPTED = 130  # the exit status of what was ended by Ctrl-C


def main() -> None:
    """Run the command line; bad input is one line on standard error and exit status 2."""
    sys.exit(_run())


def _run() -> int:
    import click

    from fedsieve.cli.app import app
    from fedsieve.errors import ClusterLost, FedSieveError, FetchFailed, TooFewUpdates

    notes = logging.StreamHandler(sys.stderr)
    notes.setFormatter(logging.Formatter("note: %(message)s"))
    notes.addFilter(_Once())
    logging.getLogger("fedsieve").addHandler(notes)
    logging.getLogger("fedsieve").setLevel(logging.INFO)
    try:
        status = app(standalone_mode=False) or 0
        if status == INTERRUPTED:  # Typer's way to say that it caught Ctrl-C
            raise KeyboardInterrupt
        return status
    except click.exceptions.NoArgsIsHelpError as asked:
        print(asked.ctx.get_help())
        return 0
    except click.ClickException as problem:
        print(f"error: {_one_line(problem.format_message())}", file=sys.stderr)
        return 2
    except FedSieveError as problem:
        print(f"error: {_one_line(str(problem))}", file=sys.stderr)
        return 1 if isinstance(problem, ClusterLost | FetchFailed | TooFewUpdates) else 2
    except (KeyboardInterrupt, click.Abort):
        print("interrupted; what was done is kept, and the same command goes on (run: with --resume)", file=sys.stderr)
        return INTERRUPTED
    except OSError as problem:
        print(f"error: {_one_line(str(problem))}", file=sys.stderr)
        return 1


class _Once(logging.Filter):
    """Lets each message through the first time only: a comparison's runs all have the same to say."""

    def __init__(self) -> None:
        super().__init__()
        self.said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        new = message not in self.said
        self.said.add(message)
        return new


def _one_line(text: str) -> str:
    return " ".join(text.split())
