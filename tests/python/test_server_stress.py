"""tests/stress_server.py, for a few seconds."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the server needs starlette")
pytest.importorskip("uvicorn", reason="the server needs uvicorn")

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from stress_server import Result, check, stress, text_of_stream


def test_many_clients():
    report = stress(clients=40, seconds=6, max_in_flight=48)
    assert report["wrong"] == []
    assert report["status"] == 0, report["output"]
    kinds = ["answers", "streams", "samples", "left", "left before the request was whole"]
    for kind in [*kinds, "wrong ones refused", "refused for now"]:
        assert report[kind] > 0, report
    assert report["preemptions"] > 0
    assert report["cancelled"] > 0
    assert "errors" not in report


def test_what_is_wrong_is_noticed():
    result = Result()
    check(result, "answers", ("a", "stop"), ("b", "stop"))
    assert result.counts == {"answers": 1, "errors": 1}
    assert result.errors == ["got ('a', 'stop'); expected ('b', 'stop')"]
    event = b'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\n'
    assert text_of_stream(b"10\r\n" + event + b"\r\n5\r\ndata: [DONE]\n\n\r\n0\r\n") == ("a", "stop")
    assert text_of_stream(event + event)[0].startswith("no end")
