"""`isles watch RUN [RUN ...]`: runs while they go on, as a page that grows, or in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import Any

from isles.view.watcher import watcher_of


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `isles watch`."""
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a run's folder, or its events.jsonl; it may come later")
    parser.add_argument("--store", metavar="URL", help="a run in an object store: a bucket, or a folder")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve on (default: 127.0.0.1, this machine)")
    parser.add_argument("--port", type=int, default=0, help="port to serve on (default: a free one)")
    parser.add_argument("--terminal", action="store_true", help="show it here instead of serving a page")


def run(args: argparse.Namespace) -> dict[str, Any] | None:
    """Serves until it is interrupted, or shows the runs until they are finished."""
    watcher = watcher_of(args.runs, args.store)
    if args.terminal:
        from isles.view.terminal import show

        return show(watcher)
    from isles.view.server import Server

    with Server(watcher, args.host, args.port) as server:
        if args.json:
            print(json.dumps(server.address), flush=True)
        else:
            print(f"watching {', '.join(args.runs) or args.store} on {server.url} (Ctrl-C ends)", flush=True)
        if server.warning:
            print(f"isles watch: {server.warning}", file=sys.stderr, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.wait()
    return None
