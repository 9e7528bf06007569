"""The command line: options in, tables or one JSON document out. Decides nothing and measures nothing itself.

Standard output holds the answer and nothing else; progress, questions and errors go to standard error. What is expected
to go wrong (`HeadwaterError`, a file that cannot be opened) is one line and exit code 1, never a traceback.
"""

from headwater.cli import bench_vllm, explain, fleet, plan, prove, serve, store, watch
from headwater.cli.admin import admin
from headwater.cli.bench import bench
from headwater.cli.main import app
from headwater.cli.pool import pool

__all__ = ["app"]

# importing them has told the application of theirs
_COMMANDS = (prove, plan, serve, watch, explain, fleet, store, bench_vllm)
app.add_typer(admin, name="admin")
app.add_typer(pool, name="pool")
app.add_typer(bench, name="bench")
