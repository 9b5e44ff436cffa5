"""Fixtures: where copies are kept, a folder or an S3 server behind a proxy. A plugin of the tests that use them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.copies import FolderPlace, S3Place
from support.packages import import_or_skip
from support.proxy import Proxy
from support.s3 import S3Server


@pytest.fixture(scope="session")
def server() -> Iterator[S3Server]:
    import_or_skip("moto"), import_or_skip("s3fs")
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def proxy(server: S3Server) -> Iterator[Proxy]:
    proxy = Proxy(server.options["endpoint_url"])
    yield proxy
    proxy.stop()


@pytest.fixture
def s3(server: S3Server, proxy: Proxy) -> S3Place:
    proxy.fault = lambda method, path: None
    proxy.requests.clear()
    return S3Place(server, proxy)


# The tests of what only a store can do, such as failing, have the fixture "s3" itself.
@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.exhaustive)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> FolderPlace:
    return FolderPlace(tmp_path / "store") if request.param == "file" else request.getfixturevalue("s3")
