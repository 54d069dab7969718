"""What goes wrong with a store, and what an island says about it: one clear line, or nothing but time."""

import dataclasses
import hashlib
import json
import math
import pathlib
import threading

import pytest
import safetensors.torch
import torch

import isles
from isles.elastic.documents import MAX_DOCUMENT_BYTES
from isles.elastic.objects import Manifest, Part, Seal, digest, manifest_name, payload_name, seal_name
from isles.elastic.requests import Answer
from isles.elastic.store import ObjectStore, open_store
from tests.reference import Tower, same, toy_backward, weights_of
from tests.stores import new_store, s3_server, threads

torch.set_num_threads(1)
METHOD = isles.Method.streaming(sync_every=4, fragments=2, overlap=1)


def train(world, steps=12, method=METHOD, layers=2, **options):
    model = Tower(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with isles.DiLoCo(model, optimizer, method, world=world, **options) as diloco:
        for step in range(1, steps + 1):
            toy_backward(model, world.rank, step)
            optimizer.step()
    return weights_of(model), diloco


def folder_run(tmp_path, **options):
    """A run in a folder that has ended, and its store. What it was writing at the end, say a manifest, is written."""
    url, before = str(tmp_path / "bucket"), set(threading.enumerate())
    train(isles.StoreWorld(url, **options))
    for thread in set(threading.enumerate()) - before:
        thread.join()
    return url, open_store(url, options.get("key"))


# ---- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quorum": 0}, "quorum=0 must be a number of islands"),
        ({"quorum": True}, "quorum=True must be"),
        ({"patience": -1.0}, "patience=-1.0 must be a number of seconds, math.inf or None"),
        ({"patience": math.nan}, "patience=nan must be"),
        ({"timeout": 0}, "timeout=0 must be a number of seconds greater than 0"),
        ({"snapshot_every": 0}, "snapshot_every=0 must be a number of rounds"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        isles.StoreWorld("memory://options", **options)


@pytest.mark.parametrize("url", ["ftp://host/run", "memory://", "", 7])
def test_urls_that_name_no_store_are_refused(url):
    with pytest.raises(ValueError, match=r"store|memory"):
        isles.StoreWorld(url)


def test_a_bucket_that_is_not_there_is_told():
    with s3_server() as address:
        own = {"access_key_id": "id", "secret_access_key": "secret", "region": "us-east-1", "endpoint": address}
        with pytest.raises(ValueError, match=r"cannot write to s3://nothing/run: .*bucket.*: check that it exists"):
            isles.StoreWorld("s3://nothing/run", **own)
        with pytest.raises(ValueError, match="cannot write to s3://nothing/run"):
            isles.probe_store("s3://nothing/run", **own)


def test_a_server_that_does_not_answer_is_told():
    own = {"access_key_id": "id", "secret_access_key": "secret", "region": "us-east-1"}
    with pytest.raises(ValueError, match="cannot write to s3://bucket/run"):
        isles.StoreWorld("s3://bucket/run", endpoint="http://127.0.0.1:9", **own)


def test_a_store_that_lets_two_creates_succeed_is_refused(monkeypatch):
    perform = ObjectStore.perform

    def overwriting(self, operation):
        return perform(self, dataclasses.replace(operation, kind="put") if operation.kind == "create" else operation)

    monkeypatch.setattr(ObjectStore, "perform", overwriting)
    with pytest.raises(ValueError, match="let two creates of one name both succeed: it ignores If-None-Match"):
        isles.probe_store("memory://overwriting")


def test_a_store_that_does_not_delete_is_refused_at_the_start(monkeypatch):
    """Not after the second snapshot, hours later: garbage is collected by whoever writes one."""
    perform = ObjectStore.perform

    def keeping(self, operation):
        return Answer("failed", "Access Denied") if operation.kind == "delete" else perform(self, operation)

    monkeypatch.setattr(ObjectStore, "perform", keeping)
    with pytest.raises(ValueError, match="cannot delete from memory://keeping: Access Denied: islands need the right"):
        isles.StoreWorld("memory://keeping")


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot use the folder"):
        isles.StoreWorld(str(tmp_path / "file" / "run"))


def test_eager_updates_are_refused_with_what_to_use_instead():
    with pytest.raises(ValueError, match=r"with a StoreWorld use Method\.distant\(\)"):
        train(isles.StoreWorld("memory://eager"), method=isles.Method.eager(sync_every=4))


def test_a_world_serves_one_island(tmp_path):
    world = isles.StoreWorld(str(tmp_path / "bucket"))
    train(world)
    with pytest.raises(ValueError, match="make a new one for every DiLoCo"):
        train(world)


# ---- other runs, other keys


def test_another_method_is_told_by_its_knobs(tmp_path):
    url, _ = folder_run(tmp_path)
    other = dataclasses.replace(METHOD, sync_every=5, outer_lr=0.7)
    with pytest.raises(isles.MismatchError, match=r"another method \(.*outer_lr=0.4 there, 0.7 here; .*sync_every=4"):
        train(isles.StoreWorld(url), method=other)


def test_another_model_is_told(tmp_path):
    url, _ = folder_run(tmp_path)
    with pytest.raises(isles.MismatchError, match=r"run\.json: this run has another model"):
        train(isles.StoreWorld(url), layers=3)


def test_frozen_values_must_be_the_same(tmp_path):
    def frozen(value):
        model = Tower(2)
        first = next(model.parameters()).requires_grad_(False)
        with torch.no_grad():
            first.fill_(value)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=1.0)
        with isles.DiLoCo(model, optimizer, METHOD, world=isles.StoreWorld(str(tmp_path / "bucket"))):
            pass

    frozen(1.0)
    frozen(1.0)
    with pytest.raises(isles.MismatchError, match="frozen values"):
        frozen(2.0)


@pytest.mark.parametrize("other", ["another", None])
def test_a_wrong_key_is_told(tmp_path, other):
    url, _ = folder_run(tmp_path, key="secret")
    train(isles.StoreWorld(url, key="secret"))
    message = r"run\.json.*(not written with this key|set ISLES_STORE_KEY)"
    with pytest.raises(ValueError, match=message):
        train(isles.StoreWorld(url, key=other))


def test_the_key_may_come_from_the_environment(tmp_path, monkeypatch):
    url, _ = folder_run(tmp_path, key="secret")
    monkeypatch.setenv("ISLES_STORE_KEY", "secret")
    train(isles.StoreWorld(url))


# ---- objects that are not what they should be


def joins(url, timeout=2.0, **options):
    return train(isles.StoreWorld(url, timeout=timeout, **options))


def test_a_damaged_payload_that_is_needed_is_named(tmp_path):
    url, _ = folder_run(tmp_path)
    path = pathlib.Path(url) / payload_name(1, 0)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(isles.LostPeerError, match=r"get rounds/00000001/0000 has failed .*damaged or cut short"):
        joins(url)


def test_a_truncated_payload_that_is_needed_is_named(tmp_path):
    url, _ = folder_run(tmp_path)
    path = pathlib.Path(url) / payload_name(2, 0)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(isles.LostPeerError, match=r"get rounds/00000002/0000 has failed"):
        joins(url)


def test_a_payload_that_is_missing_is_named_and_never_skipped(tmp_path):
    url, _ = folder_run(tmp_path)
    (pathlib.Path(url) / payload_name(2, 0)).unlink()
    with pytest.raises(isles.LostPeerError, match=r"rounds/00000002/0000 .*its payload is missing"):
        joins(url)


def test_a_seal_that_lies_about_a_digest_is_found_out(tmp_path):
    url, _ = folder_run(tmp_path)
    path = pathlib.Path(url) / seal_name(1)
    seal = json.loads(path.read_bytes())
    seal["contributions"][0]["sha256"] = hashlib.sha256(b"another payload").hexdigest()
    path.write_text(json.dumps(seal))
    with pytest.raises((isles.LostPeerError, isles.MismatchError), match=r"seal"):
        joins(url)


def test_a_seal_with_another_clock_is_found_out(tmp_path):
    url, _ = folder_run(tmp_path)
    path = pathlib.Path(url) / seal_name(1)
    seal = json.loads(path.read_bytes())
    seal["clock"] = 10**12
    path.write_text(json.dumps(seal))
    with pytest.raises(isles.MismatchError, match=r"seals/00000001\.json: its clock is 1000000000000, and must be 2"):
        joins(url)


def test_a_huge_document_is_not_read(tmp_path):
    url, _ = folder_run(tmp_path)
    path = pathlib.Path(url) / seal_name(1)
    with path.open("wb") as file:
        file.truncate(100 << 30)  # sparse: it takes no room on the disk
    with pytest.raises(isles.LostPeerError, match=rf"107374182400 bytes, and may have {MAX_DOCUMENT_BYTES}"):
        joins(url)


def test_a_huge_payload_counts_as_not_there(tmp_path, caplog):
    """Whoever wrote it: the others go on without it."""
    url = str(tmp_path / "bucket")
    model = Tower(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    intruder = pathlib.Path(url) / payload_name(1, 1)
    intruder.parent.mkdir(parents=True)
    with intruder.open("wb") as file:
        file.truncate(100 << 30)
    (pathlib.Path(url) / "islands").mkdir()
    with isles.DiLoCo(model, optimizer, METHOD, world=isles.StoreWorld(url, patience=0.1, timeout=30)) as diloco:
        token = json.loads((pathlib.Path(url) / "islands/0000.json").read_bytes())
        (pathlib.Path(url) / "islands/0001.json").write_text(json.dumps({**token, "token": "somebody else"}))
        for step in range(1, 13):
            toy_backward(model, 0, step)
            optimizer.step()
    assert diloco.stats.excluded_rounds == 0
    seal = Seal.parse((pathlib.Path(url) / seal_name(1)).read_bytes(), seal_name(1))
    assert seal.islands == (0,)


def newest_snapshot(store) -> int:
    """Of those that are whole: an island that leaves while it writes one never writes the manifest."""
    manifests = [name for name in store.list("snapshots/") if name.endswith("/manifest.json")]
    return max(int(name.split("/")[1]) for name in manifests)


def test_a_snapshot_of_another_run_is_found_out(tmp_path):
    url, store = folder_run(tmp_path)
    other, _ = folder_run(tmp_path / "other", snapshot_every=2)
    number = newest_snapshot(open_store(other))
    for name in open_store(other).list(f"snapshots/{number:08d}"):
        store.put(name, open_store(other).get(name, limit=1 << 30))
    with pytest.raises(isles.MismatchError, match="belongs to another log"):
        joins(url)


def with_another_part(tmp_path, change):
    """A run whose newest snapshot was changed, with its manifest."""
    url, store = folder_run(tmp_path, snapshot_every=2)
    number = newest_snapshot(store)
    manifest = Manifest.parse(store.get(manifest_name(number)), manifest_name(number))
    name = manifest.parts[0].name
    data = change(store.get(name, limit=1 << 30))
    parts = (Part(name, len(data), digest(data)), *manifest.parts[1:])
    store.put(name, data)
    store.put(manifest_name(number), dataclasses.replace(manifest, parts=parts).pack())
    return url


@pytest.mark.parametrize(
    ("junk", "message"),
    [
        (b"junk" * 100, "is not a part of a snapshot"),
        (safetensors.torch.save({"velocity": torch.zeros(3)}), "has fragments of .*, not"),
        (safetensors.torch.save({"anchor": torch.zeros(1)}), "has fragments of .*, not"),
    ],
    ids=["no safetensors", "no anchor", "another size"],
)
def test_a_part_of_a_snapshot_that_is_something_else_is_found_out(tmp_path, junk, message):
    url = with_another_part(tmp_path, lambda data: junk)
    with pytest.raises(isles.MismatchError, match=message):
        joins(url)


def test_a_velocity_of_another_size_is_found_out(tmp_path):
    """Copying one value into many is no error to PyTorch."""
    short = lambda data: safetensors.torch.save({**safetensors.torch.load(data), "velocity": torch.ones(1)})
    url = with_another_part(tmp_path, short)
    with pytest.raises(isles.MismatchError, match=r"has fragments of .*, not"):
        joins(url)


# ---- a store that answers badly changes nothing but time


class Rough:
    """Every third operation fails in some way, the same way every time it is run."""

    def __init__(self, store):
        self.store, self.url, self.is_local = store, store.url, store.is_local
        self.get, self.put, self.list = store.get, store.put, store.list
        self._count, self._lock = 0, threading.Lock()

    def perform(self, operation):
        with self._lock:
            self._count += 1
            turn = self._count
        if turn % 3:
            return self.store.perform(operation)
        if turn % 4 == 0 and operation.kind != "get":  # done, and the answer is lost
            self.store.perform(operation)
            return Answer("again", "the connection was closed")
        if turn % 4 == 1 and operation.kind == "create":  # 409, and nothing written
            return Answer("exists")
        return Answer("again", "503 slow down")


def test_errors_of_the_store_change_nothing_but_time(tmp_path):
    smooth = isles.run_local(lambda world: train(world, steps=30), 2)
    with new_store("memory", tmp_path) as (url, _):
        worlds = [isles.StoreWorld(url, quorum=2, patience=math.inf, timeout=100) for _ in range(2)]
        turns = [threading.Event(), threading.Event()]
        turns[0].set()

        def island(index):
            world = worlds[index]
            world.store = Rough(world.store)
            turns[index].wait()
            model = Tower(2)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            with isles.DiLoCo(model, optimizer, METHOD, world=world):
                turns[-1].set()
                for step in range(1, 31):
                    toy_backward(model, world.rank, step)
                    optimizer.step()
            return weights_of(model)

        for one, (other, _) in zip(threads(lambda: island(0), lambda: island(1)), smooth, strict=True):
            assert same(one, other)


def test_a_store_that_keeps_failing_is_an_error_after_the_timeout(tmp_path):
    with new_store("memory", tmp_path) as (url, _):
        world = isles.StoreWorld(url, timeout=0.5)
        model = Tower(2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        diloco = isles.DiLoCo(model, optimizer, METHOD, world=world)
        perform = world.store.perform
        world.store.perform = lambda operation: (
            Answer("again", "503 slow down") if operation.kind == "put" else perform(operation)
        )
        toy_backward(model, 0, 1)
        message = r"put rounds/0000000\d/0000 has failed \d+ times .*503 slow"
        with pytest.raises(isles.LostPeerError, match=message):
            [optimizer.step() for _ in range(100)]
        diloco.close()


# ---- long runs


def test_memory_and_requests_do_not_grow_with_the_age_of_a_run(tmp_path):
    """What an island holds, what the store holds besides seals, and requests per round: late as early."""
    with new_store("memory", tmp_path) as (url, _):
        world = isles.StoreWorld(url)
        model = Tower(2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        requests = []
        perform = world.store.perform
        world.store.perform = lambda operation: [perform(operation), requests.append(operation.kind)][0]
        measured = []
        with isles.DiLoCo(model, optimizer, METHOD, world=world) as diloco:
            for step in range(1, 1601):
                toy_backward(model, 0, step)
                optimizer.step()
                if step % 400 == 0:
                    driver = world._session.driver
                    held = len(driver.kept) + len(driver.member._rounds) + len(driver.member.log._seals)
                    held += len(world._session._own) + len(driver._averages)
                    names = [
                        name for kind in ("rounds/", "snapshots/", "islands/") for name in open_store(url).list(kind)
                    ]
                    measured.append((len(requests), held, len(names)))
                    requests.clear()
        assert diloco.stats.excluded_rounds == 0
        early, late = measured[1], measured[-1]
        assert late[0] <= 1.5 * early[0]
        assert late[1] <= early[1] + 10
        assert late[2] <= 1.5 * early[2]
