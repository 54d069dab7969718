"""The object store: a few operations by name, with every way in which they end as one word.

`open_store(url)` gives the store of a run. The url is `s3://bucket/run`, `gs://bucket/run`, `az://container/run`, a
folder (`file:///mnt/share/run`, or a plain path), or `memory://NAME` for islands of one process. Endpoint, region and
credentials are obstore's affair: its environment variables (AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID ...), or
options of `open_store`.

The protocol needs one thing that not every store has: of two creates of one name only one may succeed. `probe_store`
tries it.

With a key, every object ends with an HMAC-SHA256 over its name and content. So whoever has rights to write to the
bucket, but not the key, cannot make islands read anything: neither new objects nor old ones under other names. A key is
for one run: an object of another run with the same key and name would pass.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import threading
import time
import uuid
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from isles.elastic.documents import MAX_DOCUMENT_BYTES
from isles.elastic.objects import ROUNDS
from isles.elastic.requests import Answer, Operation

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "https")
KEY_VARIABLE = "ISLES_STORE_KEY"
NEEDS_KEY = f"this run has a key: pass key=, or set {KEY_VARIABLE}"
TAG_BYTES = hashlib.sha256().digest_size
REQUEST_SECONDS = 120.0
"""A request of one object may take so long, and longer where `timeout` says so: large payloads on slow links."""
PAUSES = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""Seconds between attempts where somebody insists."""

_memory: dict[str, tuple[Any, threading.RLock]] = {}
"""The stores of `memory://NAME`. Threads take turns: in obstore before 0.12 two may wait for each other for ever. The
one that deletes has the store's lock and waits for the GIL; the one that lists has the GIL and waits for the lock.
"""


class ObjectStore:
    """The objects of one run. Methods may be called from many threads; they release the GIL while they wait."""

    def __init__(self, url: str, client: Any, key: bytes | None, turn: AbstractContextManager[Any]) -> None:
        self.url, self._client, self._key, self._turn = url, client, key, turn
        self.is_local = url.startswith("memory://") or "://" not in url
        """Whether asking costs nothing: a folder, or this process."""

    def perform(self, operation: Operation) -> Answer:
        """Does what the protocol asks for. Never raises."""
        with self._turn:
            return self._perform(operation)

    def _perform(self, operation: Operation) -> Answer:
        import obstore
        from obstore import exceptions

        kind, name = operation.kind, operation.name
        try:
            if kind == "get":
                return self._get(name, operation.limit)
            if kind == "list":
                return Answer("ok", self.list(name))
            if kind == "delete":
                obstore.delete(self._client, name)
            else:
                data = self._signed(name, operation.body)
                obstore.put(self._client, name, data, mode="create" if kind == "create" else "overwrite")
            return Answer("ok")
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            return Answer("exists" if kind == "create" else "again", "the store says that it exists")
        except FileNotFoundError as error:
            return Answer("missing") if kind in ("get", "delete") else Answer("failed", self._explain(error))
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            return Answer("failed", self._explain(error))
        except Exception as error:  # time-outs, lost connections, 429, 500, 503, a full disk: all may pass
            return Answer("again", self._explain(error))

    def insist(self, operation: Operation) -> Answer:
        """As `perform`, a few times if need be, for whoever stands outside the protocol, which tries again by itself.

        A create that says "exists" may have been this one's own first attempt, or a store that has written nothing.
        """
        for pause in (*PAUSES, None):
            answer = self.perform(operation)
            if operation.kind == "create" and answer.status == "exists":
                there = self.perform(Operation("get", operation.name, limit=len(operation.body)))
                if there.status == "ok" and there.value == operation.body:
                    return Answer("ok")
                if there.status in ("missing", "again"):
                    answer = Answer("again", "the store says that it exists, and does not have it")
            if answer.status != "again" or pause is None:
                break
            time.sleep(pause)
        return answer

    def get(self, name: str, limit: int = MAX_DOCUMENT_BYTES) -> bytes | None:
        """An object, or None if there is none; ValueError if it cannot be read."""
        answer = self.insist(Operation("get", name, limit=limit))
        if answer.status == "ok":
            return bytes(answer.value)
        if answer.status == "missing":
            return None
        raise ValueError(f"cannot read {name} in {self.url}: {answer.value}")

    def put(self, name: str, data: bytes, *, create: bool = False) -> bool:
        """Writes an object; with `create` only if there is none. Returns whether it was written."""
        answer = self.insist(Operation("create" if create else "put", name, data))
        if answer.status in ("ok", "exists"):
            return answer.status == "ok"
        raise ValueError(f"cannot write {name} to {self.url}: {answer.value}")

    def list(self, prefix: str) -> list[str]:
        """The names that begin with a folder, in no order."""
        import obstore

        with self._turn:
            return [item["path"] for chunk in obstore.list(self._client, prefix=prefix.rstrip("/")) for item in chunk]

    def _get(self, name: str, limit: int) -> Answer:
        import obstore

        found = obstore.get(self._client, name)
        extra = TAG_BYTES if self._key else 0
        if found.meta["size"] > limit + extra:
            what = f"{name} has {found.meta['size']} bytes, and may have {limit}"
            return Answer("damaged" if name.startswith(ROUNDS) else "failed", what)
        data = memoryview(found.bytes())  # type: ignore[arg-type]
        if self._key is None:
            return Answer("damaged", f"{name}: {NEEDS_KEY}") if _is_signed(name, data) else Answer("ok", data.tobytes())
        body, tag = data[:-TAG_BYTES], data[-TAG_BYTES:]
        if len(data) < TAG_BYTES or not hmac.compare_digest(self._tag(name, body), bytes(tag)):
            return Answer("damaged", f"{name} is refused: it was not written with this key")
        return Answer("ok", body.tobytes())

    def _signed(self, name: str, body: bytes) -> bytes:
        return body if self._key is None else body + self._tag(name, body)

    def _tag(self, name: str, body: bytes | memoryview) -> bytes:
        assert self._key is not None
        signed = hmac.new(self._key, name.encode() + b"\0", hashlib.sha256)
        signed.update(body)
        return signed.digest()

    def _explain(self, error: Exception) -> str:
        """One line: what the server says, if it says something."""
        text = _one_line(error)
        said = re.search(r"<Message>(.*?)</Message>", text) or re.search(r"status code: (\d+ [\w ]+)", text)
        return said[1] if said else text[:300]


def _one_line(error: Exception) -> str:
    """What obstore says, without what it says to its programmers."""
    return " ".join(str(error).split("Debug source")[0].split())


class NoFolderError(ValueError):
    """There is no such folder, and whoever only reads does not make one."""


def open_store(
    url: str, key: str | bytes | None = None, timeout: float = 600.0, *, create: bool = True, **options: Any
) -> ObjectStore:
    """The store behind a url; ValueError if there is no such kind. A folder that is not there is made, unless `create`
    is False. `options` go to obstore.
    """
    try:
        import obstore.store
    except ImportError:
        raise ValueError("object stores need obstore: pip install 'isles[store]'") from None
    if not isinstance(url, (str, Path)) or not str(url):
        raise ValueError(f"{url!r} is not the url of a store: give s3://bucket/run, a folder, or memory://NAME")
    url = str(url)
    scheme, separator, rest = url.partition("://")
    turn: AbstractContextManager[Any] = nullcontext()
    if not separator or scheme in ("memory", "file"):
        if options:
            raise ValueError(f"{', '.join(options)}: a store in memory or in a folder has no such option")
    elif not rest.partition("/")[0]:
        raise ValueError(f"{url} names no bucket: give {scheme}://bucket/run")
    if separator and scheme == "memory":
        if not rest:
            raise ValueError("memory:// needs a name: memory://NAME, the same for all islands of this process")
        client, turn = _memory.setdefault(rest, (obstore.store.MemoryStore(), threading.RLock()))
    elif not separator or scheme == "file":
        folder = Path(rest if separator else url).expanduser().absolute()
        client, url = _folder(folder, create), str(folder)
    elif scheme in SCHEMES:
        client = _remote(url, timeout, options)
    else:
        known = "s3://, gs://, az://, file://, memory:// or a plain path"
        raise ValueError(f"{url} is no store that isles knows: use {known}")
    return ObjectStore(url, client, _key(key), turn)


def _folder(folder: Path, create: bool) -> Any:
    import obstore.store

    if not create and not folder.exists():
        raise NoFolderError(f"there is no run in {folder}: there is no such folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return obstore.store.LocalStore(folder)
    except OSError as error:
        raise ValueError(f"cannot use the folder {folder} as a store: {error.strerror or error}") from None


def _remote(url: str, timeout: float, options: dict[str, Any]) -> Any:
    import obstore.store

    seconds = f"{max(REQUEST_SECONDS, timeout / 4):.0f}s"
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoint = options.get("endpoint") or next(filter(None, map(os.environ.get, names)), None)
    client = {"timeout": seconds, "connect_timeout": "15s", "allow_http": str(endpoint).startswith("http://")}
    client |= options.pop("client_options", {})
    retry = {"max_retries": 1, **options.pop("retry_config", {})}  # the protocol tries again by itself
    try:
        return obstore.store.from_url(url, client_options=client, retry_config=retry, **options)  # type: ignore[call-overload]
    except Exception as error:
        raise ValueError(f"cannot open the store {url}: {_one_line(error)[:300]}") from None


def _is_signed(name: str, data: memoryview) -> bool:
    """Whether a document has an HMAC behind it: bytes that no text has."""
    text, tag = data[:-TAG_BYTES], bytes(data[-TAG_BYTES:])
    return name.endswith(".json") and bytes(text[-1:]) == b"}" and not tag.isascii()


def _key(key: str | bytes | None) -> bytes | None:
    name = KEY_VARIABLE if key is None else "key"
    key = os.environ.get(KEY_VARIABLE) if key is None else key
    if key is None:
        return None
    if not isinstance(key, (str, bytes)) or not key:
        found = f"of type {type(key).__name__}" if key else "empty"  # never the secret itself
        raise ValueError(f"{name} is {found}: it must be text that all islands share; a run without one leaves it out")
    return key.encode() if isinstance(key, str) else key


def probe_store(url: str, key: str | bytes | None = None, **options: Any) -> None:
    """Raises ValueError, with what is wrong, unless isles can work with this store: objects can be written, read and
    deleted, and of two creates of one name the second one fails.
    """
    probe(open_store(url, key, **options))


def probe(store: ObjectStore) -> None:
    """The same for a store that is open."""
    name, bodies = f"probes/{uuid.uuid4().hex}", [b"first", b"second"]
    try:
        first = store.insist(Operation("create", name, bodies[0]))
        if first.status != "ok":
            advice = "check that it exists, and that these credentials may write to it"
            raise ValueError(f"cannot write to {store.url}: {first.value}: {advice}")
        if store.insist(Operation("create", name, bodies[1])).status == "ok":
            raise ValueError(
                f"{store.url} let two creates of one name both succeed: it ignores If-None-Match, and islands would "
                "overwrite each other's decisions. Use another store, or a newer version of this one"
            )
        found = store.insist(Operation("get", name))
        if found.status != "ok":
            raise ValueError(f"cannot read what was written to {store.url}: {found.value or found.status}")
        if found.value != bodies[0]:
            raise ValueError(f"{store.url} returned other bytes than were written: use another store")
    finally:
        deleted = store.perform(Operation("delete", name))
    if deleted.status == "failed":
        advice = "islands need the right to, for what nobody reads any more"
        raise ValueError(f"cannot delete from {store.url}: {deleted.value}: {advice}")
