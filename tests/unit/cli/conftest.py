import threading
from collections.abc import Iterator

import pytest

from tests.unit.cli.openai_stub import OpenAiStub


@pytest.fixture
def openai_stub() -> Iterator[OpenAiStub]:
    with OpenAiStub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
