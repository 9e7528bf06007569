"""The application: what concerns all commands, and what goes wrong in any of them."""

import errno
import signal
from typing import Annotated, Any

import typer
from rich.text import Text

from headwater.core.errors import HeadwaterError
from headwater.core.version import __version__
from headwater.lab import draw


class _Group(typer.core.TyperGroup):
    """Turns what is expected to go wrong into one line and exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except HeadwaterError as error:
            problem = str(error)
        except MemoryError:
            problem = "not enough memory for that"
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            problem = "this command moves tensors and needs torch: pip install 'headwater[torch]'"
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            problem = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        draw.errors().print(Text(f"headwater: {problem}"), style="red", soft_wrap=True)
        raise typer.Exit(1)


app = typer.Typer(
    cls=_Group,
    name="headwater",
    help="A tiered, shared, verified KV cache for LLM serving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headwater {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Say what concerns all commands; each does its own work."""
    signal.signal(signal.SIGTERM, _interrupt)  # so that whatever was made for a moment is removed
