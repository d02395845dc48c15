"""`python -m octavo.serving`: clients that leave, too many of them, signals, wrong requests and arguments."""

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("starlette", reason="the server needs starlette")
pytest.importorskip("uvicorn", reason="the server needs uvicorn")

from support.served_model import greedy
from support.server_process import ServerProcess, environment_with_tests, read_events, serve

SLOW = "support.served_model:load_slow"
GREEDY = {"temperature": 0, "max_tokens": 24}
# A request to the slow model, which stops at no token.
ENDLESS = {"prompt": "prompt 7", "temperature": 0, "max_tokens": 3000}
CACHE = ("--num-pages", "1024", "--page-size", "4")


@pytest.fixture(scope="module")
def server():
    with serve("--num-pages", "256") as server:
        yield server


@pytest.fixture
def slow():
    with serve(*CACHE, model=SLOW) as server:
        yield server


def begin(server, **fields):
    """A stream of which the first token has come."""
    response = server.request("POST", "/v1/completions", {**ENDLESS, "stream": True, **fields})
    assert response.status == 200
    events = read_events(response)
    next(events)
    return response, events


def leave(response):
    response.close()
    response.connection.close()


def test_answers(server):
    status, answer = server.post({"prompt": "Hello", **GREEDY})
    assert status == 200
    assert answer["choices"][0]["text"] == greedy("Hello", 24)[0]


# Clients that leave


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(slow, stream):
    with socket.create_connection(("127.0.0.1", slow.port)) as connection:
        body = json.dumps({**ENDLESS, "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        slow.wait_for(lambda metrics: metrics["octavo_generated_tokens_total"] > 3)
    found = slow.wait_for(lambda metrics: metrics['octavo_used_pages{group="0"}'] == 0)
    assert found["octavo_answers_cancelled_total"] == 1
    assert found["octavo_in_flight_answers"] == 0
    assert found["octavo_generated_tokens_total"] < 300


def test_others_do_not_notice_a_client_that_leaves(slow):
    response, _ = begin(slow, prompt="prompt 8")
    other, events = begin(slow, max_tokens=40)
    leave(response)
    texts = [event["choices"][0]["text"] for event in events if event != "[DONE]"]
    assert greedy(ENDLESS["prompt"], 40, stops=False)[0].endswith("".join(texts))
    assert len(texts) >= 38
    leave(other)


def test_a_client_that_leaves_while_it_waits(slow):
    """Sixty-four sequences run at once; of the sixty-fifth nothing is computed."""
    first, _ = begin(slow, n=64, temperature=1, prompt="prompt 1")
    waiting = threading.Event()

    def wait():
        with socket.create_connection(("127.0.0.1", slow.port)) as connection:
            body = json.dumps({**ENDLESS, "prompt": "x" * 300}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            waiting.wait(10)

    thread = threading.Thread(target=wait)
    thread.start()
    slow.wait_for(lambda metrics: metrics["octavo_waiting_sequences"] == 1)
    waiting.set()
    thread.join()
    slow.wait_for(lambda metrics: metrics["octavo_waiting_sequences"] == 0)
    leave(first)


def test_a_client_that_does_not_finish_its_request(server):
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n")
        connection.sendall(b"Content-Type: application/json\r\n\r\n{")
    assert server.post({"prompt": "Hello", **GREEDY})[0] == 200


@pytest.mark.parametrize(
    "garbage", [b"\x00\xff\x16\x03\x01\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 50]
)
def test_garbage_instead_of_http(server, garbage):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(garbage)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(4096)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    assert server.request("GET", "/health").status == 200


# Too many


def test_too_many_answers_are_refused_for_now():
    with serve(*CACHE, "--max-in-flight", "3", model=SLOW) as server:
        first, _ = begin(server, n=2, temperature=1)
        response = server.request("POST", "/v1/completions", {**ENDLESS, "n": 2})
        error = json.loads(response.read())["error"]
        assert (response.status, error["type"]) == (429, "rate_limit_error")
        assert 1 <= int(response.headers["Retry-After"]) <= 60
        assert "2 answers of at most 3 are in flight" in error["message"]
        assert server.post({"prompt": "Hello", **GREEDY})[0] == 200  # there is room for one
        leave(first)
        server.wait_for(lambda metrics: metrics["octavo_in_flight_answers"] == 0)
        assert server.post({"prompt": "Hello", **GREEDY, "n": 3})[0] == 200
        assert server.metrics()['octavo_http_requests_total{path="/v1/completions",status="429"}'] == 1


# Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_in_mid_stream(number):
    """The stream ends by an error that says why; the exit status says that all pages were free."""
    server = ServerProcess(*CACHE, "--grace", "0.2", model=SLOW)
    response, events = begin(server, n=3, temperature=1)
    page = server.request("GET", "/events")
    page.readline()
    waiting = server.request("GET", "/health")  # a connection that stays open
    server.process.send_signal(number)
    *_, error, done = events
    assert error["error"]["code"] == "server_stopping"
    assert done == "[DONE]"
    assert response.read() == b"" and page.read().count(b"data: ") >= 0
    status, output = server.wait()
    assert status == 0, output
    assert "3 answers are cut off" in output
    leave(waiting)


def test_a_stop_lets_answers_finish():
    server = ServerProcess(*CACHE, model=SLOW)
    _, events = begin(server, max_tokens=60)
    whole = []
    thread = threading.Thread(target=lambda: whole.append(server.post({**ENDLESS, "max_tokens": 50})))
    thread.start()
    server.wait_for(lambda metrics: metrics["octavo_in_flight_answers"] == 2)
    server.process.send_signal(signal.SIGTERM)
    *_, last, done = events
    assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
    thread.join()
    ((code, answer),) = whole
    assert (code, answer["choices"][0]["text"]) == (200, greedy(ENDLESS["prompt"], 50, stops=False)[0])
    status, output = server.wait()
    assert (status, "cut off" in output) == (0, False)


def test_nobody_is_let_in_during_a_stop():
    server = ServerProcess(*CACHE, "--grace", "5", model=SLOW)
    response, events = begin(server, max_tokens=100)
    server.process.send_signal(signal.SIGTERM)
    refused = False
    for _ in events:
        try:
            refused |= server.request("GET", "/health").status == 503
        except OSError:
            refused = True
    assert refused
    assert server.wait()[0] == 0
    leave(response)


def test_a_second_ctrl_c_does_not_wait():
    server = ServerProcess(*CACHE, "--grace", "60", model=SLOW)
    _, _ = first = begin(server)
    server.process.send_signal(signal.SIGINT)
    assert "Shutting down" in server.process.stdout.readline() + server.process.stdout.readline()
    status, _ = server.stop(signal.SIGINT, timeout=10)
    assert status == 1
    leave(first[0])


def test_bodies_that_do_not_come_count_as_in_flight():
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with serve(*CACHE, "--max-in-flight", "2") as server:
        with contextlib.ExitStack() as connections:
            for _ in range(2):
                address = ("127.0.0.1", server.port)
                connection = connections.enter_context(socket.create_connection(address))
                connection.sendall(head + b'Content-Length: 100\r\n\r\n{"prompt": ')
            wait_for_status(server, 429)
        wait_for_status(server, 200)
        status, answer = server.post({"prompt": ["a", "b"], **GREEDY})
        assert status == 200 and len(answer["choices"]) == 2  # all the room is there again


def wait_for_status(server, wanted):
    end = time.monotonic() + 10
    while (status := server.post({"prompt": "Hello", **GREEDY})[0]) != wanted:
        assert time.monotonic() < end, status


def test_a_step_that_fails_ends_the_server():
    """Clients learn that, and the log why; nothing goes on as if nothing had been."""
    server = ServerProcess(*CACHE, model="support.served_model:load_broken")
    status, answer = server.post({**ENDLESS})
    assert (status, answer["error"]["code"]) == (500, "engine_failed")
    assert answer["error"]["message"] == "the engine has failed"
    status, output = server.wait()
    assert status == 1
    assert "ArithmeticError: the tenth step" in output


# The command


def command(*arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "octavo.serving", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**environment_with_tests(), **environment},
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", ""])
def test_other_machines_need_a_key(host):
    status, said = command("--host", host)
    assert status == 2
    assert "give --api-key" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "nowhere:load"), "No module named 'nowhere'"),
        (("--model", "support.served_model:nothing"), "has no function 'nothing'"),
        (
            ("--model", "support.served_model:not_a_model"),
            "octavo.serving.server.Model; got int",
        ),
        (("--model", "support.served_model:load", "--memory", "1K"), "memory"),
        (("--token-budget", "63"), "--max-batch (64) must be at most --token-budget (63): each sequence"),
        (("--max-batch", "99999999999"), "--max-batch (99999999999) must be at most --token-budget (512)"),
        (("--model", "support.served_model:load", "--token-budget", f"{10**14}"), "Unable to allocate"),
        (
            ("--model", "support.served_model:load", "--kv-dtype", "float16"),
            "--kv-dtype float16: append_kv: k must be float16 like k_pages; got float32",
        ),
        (("--api-key", ""), "the API key must have"),
        (("--api-key", " secret"), "--api-key: the API key must not begin or end with a space"),
        (("--api-key", "secret "), "--api-key: the API key must not begin or end with a space"),
        (("--port", "70000"), "70000 is no port"),
        (("--num-pages", "0"), "0 is no positive integer"),
        (("--memory", "4X"), "4X is no size: a positive integer of bytes, or of K, M, G, T, such as 512M"),
        (("--memory", "0G"), "0G is no size"),
        (("--max-body", "G"), "G is no size"),
        (("--num-pages", "1", "--memory", "1G"), "not allowed with"),
    ],
)
def test_wrong_arguments(arguments, said):
    status, message = command(*arguments)
    assert status in (1, 2)
    assert said in message


def test_a_port_that_is_taken(server):
    status, said = command("--model", "support.served_model:load", "--port", str(server.port))
    assert status != 0
    assert "address already in use" in said


def test_spaces_around_the_key_of_the_environment():
    status, message = command(OCTAVO_API_KEY="secret ")
    assert status == 2
    assert "OCTAVO_API_KEY: the API key must not begin or end with a space" in message


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have 127.0.0.1 alone")
def test_another_address_of_this_machine():
    with serve("--host", "127.0.0.2", "--num-pages", "64") as server:
        for name, expected in (("127.0.0.2", 200), ("localhost", 200), ("evil.example", 403)):
            connection = http.client.HTTPConnection("127.0.0.2", server.port, timeout=10)
            connection.request("GET", "/v1/models", headers={"Host": f"{name}:{server.port}"})
            assert connection.getresponse().status == expected
            connection.close()


def test_the_key_of_the_environment():
    with serve("--num-pages", "64", OCTAVO_API_KEY="secret") as server:
        assert server.request("GET", "/v1/models").status == 401
        headers = {"Authorization": "Bearer secret"}
        assert server.request("GET", "/v1/models", headers=headers).status == 200


def test_other_machines_with_a_key_or_without():
    with serve("--host", "0.0.0.0", "--num-pages", "64", "--api-key", "secret") as server:
        assert server.request("GET", "/v1/models").status == 401
    with serve("--host", "0.0.0.0", "--num-pages", "64", "--no-api-key") as server:
        assert server.request("GET", "/v1/models", headers={"Host": "example.org"}).status == 200
        assert "no API key: 0.0.0.0 serves whoever can reach it" in "".join(server.output)


def test_without_the_packages_of_the_server():
    program = (
        "import runpy, sys; sys.modules['uvicorn'] = None; sys.argv = ['x'];"
        "runpy.run_module('octavo.serving', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert 'pip install "octavo[serve]"' in done.stderr
