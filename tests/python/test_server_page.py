"""The page that shows the cache, in a browser: cells appear and change while answers are streamed."""

import pytest

pytest.importorskip("starlette", reason="the server needs starlette")
pytest.importorskip("uvicorn", reason="the server needs uvicorn")

from support.browser import find_browser, open_browser
from support.server_process import read_events, serve

PROGRAM = find_browser()
if PROGRAM is None:
    pytest.skip("there is no Chromium", allow_module_level=True)

SLOW = "support.served_model:load_slow"
LONG = {"prompt": "prompt 7" * 20, "temperature": 1, "max_tokens": 900, "stream": True}

# The distinct colours of the cells in the picture with their numbers: {"255,0,0": 3, ...}.
COLOURS = """(() => {
  const canvas = document.querySelector("canvas");
  if (!canvas || !canvas.width) return {};
  const group = [...document.querySelectorAll("h2")][0].textContent;
  const pages = Number(group.match(/(\\d+) pages/)[1]);
  const { data, width, height } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  // Cells are squares with a gap of a pixel: their side is where the second one begins.
  let side = 1;
  while (side < width && !(data[4 * (side - 1) + 3] === 0 && data[4 * side + 3] !== 0)) side++;
  const columns = Math.floor(width / side);
  const found = {};
  for (let page = 0; page < pages; page++) {
    const x = (page % columns) * side + 1;
    const y = Math.floor(page / columns) * side + 1;
    const colour = [...data.slice(4 * (y * width + x), 4 * (y * width + x) + 3)].join();
    found[colour] = (found[colour] || 0) + 1;
  }
  return found;
})()"""


@pytest.fixture(scope="module")
def browser():
    with open_browser(PROGRAM) as browser:
        yield browser


@pytest.fixture
def server():
    with serve("--num-pages", "300", "--page-size", "4", model=SLOW) as server:
        yield server


def number(browser, name):
    return float(browser.evaluate(f"document.getElementById('{name}').textContent.split(' ')[0]"))


def open_page(browser, server):
    browser.open(f"http://127.0.0.1:{server.port}/")
    browser.wait_for("document.getElementById('state')?.textContent === 'live'")
    browser.wait_for("document.querySelector('canvas')?.width > 0")


def test_cells_show_who_holds_which_page(browser, server):
    open_page(browser, server)
    assert browser.evaluate("document.getElementById('model').textContent") == "exact"
    empty = browser.evaluate(COLOURS)
    assert list(empty.values()) == [300]  # all free
    (free,) = empty

    response = server.request("POST", "/v1/completions", {**LONG, "n": 2})
    events = read_events(response)
    next(events)
    browser.wait_for("document.querySelectorAll('#sequences li').length === 2")
    before = browser.evaluate(COLOURS)
    # Free; of each of the two sequences; and the prompt's pages, which both share.
    assert len(before) == 4 and sum(before.values()) == 300
    assert 40 in before.values()
    assert number(browser, "running") == 2

    browser.wait_for(f"document.getElementById('used').textContent.split(' ')[0] > {300 - before[free] + 10}")
    after = browser.evaluate(COLOURS)
    assert set(after) == set(before)
    grown = {colour: after[colour] - before[colour] for colour in before}
    assert grown[free] <= -10
    assert sorted(grown.values())[1] == 0  # the shared ones
    assert sum(grown.values()) == 0
    assert number(browser, "tokens_per_second") > 0

    response.close()
    response.connection.close()
    browser.wait_for("document.getElementById('used').textContent.startsWith('0 ')")
    left = browser.evaluate(COLOURS)
    assert sum(left.values()) == 300
    assert len(left) == 2 and left[free] < 300  # some are free, but still found by their tokens
    assert browser.evaluate("document.querySelectorAll('#sequences li').length") == 0
    assert browser.errors == []


def test_the_rate_of_hits(browser, server):
    open_page(browser, server)
    for _ in range(2):
        server.post({"prompt": "x" * 41, "max_tokens": 1})
    browser.wait_for("document.getElementById('hit_rate').textContent === '48.8 %'")  # 40 of 82


def test_the_page_asks_for_the_key(browser):
    with serve("--num-pages", "64", "--api-key", "secret") as server:
        browser.open(f"http://127.0.0.1:{server.port}/")
        browser.wait_for("document.getElementById('state')?.textContent === 'locked'")
        for key, state in (("wrong", "the key is wrong"), ("secret", "live")):
            browser.evaluate(
                f"document.getElementById('key').value = '{key}';"
                "document.getElementById('login').requestSubmit()"
            )
            browser.wait_for(f"document.getElementById('state').textContent === '{state}'")
        browser.wait_for("document.querySelector('canvas')?.width > 0")
        assert browser.evaluate("document.getElementById('login').hidden") is True


def test_the_page_comes_back_with_its_server(browser):
    with serve("--num-pages", "64") as server:
        open_page(browser, server)
        port = str(server.port)
    browser.wait_for("document.getElementById('state').textContent.startsWith('no connection')")
    with serve("--num-pages", "128", "--port", port):
        browser.wait_for("document.getElementById('used').textContent === '0 / 128'")
        assert browser.evaluate("document.getElementById('state').textContent") == "live"
