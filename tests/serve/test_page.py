"""The live page in headless Chromium, over a real server with a real engine.

With SCREENSHOTS=folder in the environment, `test_screenshots` writes its pictures there; those of the READMEs
are in docs/screenshots.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect

from browser import PROGRAM, Browser, Page
from server_process import Server

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium")

MODEL = Path(__file__).parents[1] / "data" / "demo-stories"
FLAGS = (
    "--device",
    "cpu",
    "--num-blocks-override",
    "600",
    "--max-num-seqs",
    "8",
    "--served-model-name",
    "stories",
)
STORY = "Once upon a time there was a little girl who liked "


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started = Server(MODEL, *FLAGS)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as started:
        yield started


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    with opened(browser, server) as found:
        yield found


@contextlib.contextmanager
def opened(browser: Browser, server: Server, *, errors: int = 0) -> Iterator[Page]:
    """The page, connected, whose console shows so many errors, and which asks nobody but the server."""
    with browser.page() as found:
        found.show(1280, 900)
        found.open(f"{server.url}/")
        yield found
        found.eval("0")  # what the browser has told by then has been taken in
        assert len(found.errors) == errors, found.errors
        hosts = {
            re.match(r"\w+://([^/]*)/", url)[1] for url in found.requests if not url.startswith("about:")
        }
        assert hosts == {server.url.removeprefix("http://")}


def ready(page: Page) -> None:
    page.wait_for("document.querySelector('#state').dataset.state === 'ready'")


def ask(page: Page, text: str) -> None:
    page.eval("document.querySelector('#prompt').focus()")
    page.type(text)
    page.press("Enter")


FACTS = "[...document.querySelectorAll('.facts')].map((element) => element.textContent)"


def number(page: Page, selector: str) -> float:
    return float(page.text(selector).replace(",", ""))


def begin_load(socket: ClientConnection, requests: int, tokens: int) -> None:
    for index in range(requests):
        length = tokens * (4 + index % 5) // 8
        body = {"prompt": STORY * (3 + index % 3), "max_tokens": length, "ignore_eos": True}
        socket.send(json.dumps({"type": "completion", "id": str(index), **body}))


@contextlib.contextmanager
def load(server: Server, requests: int, tokens: int) -> Iterator[None]:
    """Requests that run while the context lasts, more than the batch takes."""
    with connect(f"{server.url.replace('http', 'ws')}/v1/stream", max_queue=None) as socket:
        begin_load(socket, requests, tokens)
        yield


def test_a_message_is_answered_token_by_token(page):
    ready(page)
    assert page.text("#model") == "stories, context 1,024 tokens"
    ask(page, "a story about a fox")
    page.wait_for(f"{FACTS}.length === 1")
    assert page.text(".message.user") == "a story about a fox"
    assert re.match(
        r"(complete|cut at max tokens) · \d+ \+ \d+ tokens · first after \d+ ms", page.eval(FACTS)[0]
    )
    text = page.text(".message.assistant")
    spans = page.eval("[...document.querySelectorAll('.token')].map((span) => span.textContent)")
    assert len(spans) > 5
    # Every character of the answer that is no space belongs to a token that can be pointed at.
    assert re.sub(r"\s", "", "".join(spans)) == re.sub(r"\s", "", text)
    page.hover(".token")
    page.wait_for("!document.querySelector('#tip').hidden")
    assert re.match(r"(< 0.1|\d+\.\d) % +\S+\ninstead of\n\d", page.text("#tip"))
    # The next question carries the conversation so far.
    prompt_tokens = int(re.search(r"· (\d+) \+", page.eval(FACTS)[0])[1])
    ask(page, "and then?")
    page.wait_for(f"{FACTS}.length === 2")
    assert int(re.search(r"· (\d+) \+", page.eval(FACTS)[1])[1]) > 2 * prompt_tokens


def test_the_keyboard_alone_is_enough(page):
    ready(page)
    page.press("Tab")
    assert page.eval("document.activeElement.className") == "skip"
    for _ in range(10):
        if page.eval("document.activeElement.id") == "prompt":
            break
        page.press("Tab")
    assert page.eval("document.activeElement.id") == "prompt"
    page.type("a story")
    page.press("Enter", shift=True)
    page.type("about a whale")
    assert page.eval("document.querySelector('#prompt').value") == "a story\nabout a whale"
    page.press("Enter")
    page.wait_for("document.querySelectorAll('.token').length > 3")
    page.press("Escape")
    page.wait_for(f"{FACTS}.length === 1")
    assert page.eval(FACTS)[0].startswith("stopped · ")
    assert page.text("#said") == "Answer stopped"
    assert page.eval("document.activeElement.id") == "prompt"
    # Tokens by the arrow keys.
    page.eval("document.querySelector('.message.assistant').focus()")
    page.press("ArrowRight")
    page.press("ArrowRight")
    assert page.eval("document.querySelectorAll('.token')[1].classList.contains('shown')")
    assert "%" in page.text("#tip")
    page.press("Escape")
    assert page.eval("document.querySelector('#tip').hidden")


def test_sampling_settings_go_with_the_request(page):
    ready(page)
    page.eval(
        "document.querySelector('#temperature').value = 0; document.querySelector('#max_tokens').value = 7"
    )
    page.eval("document.querySelector('#probabilities').checked = false")
    for _ in range(2):
        ask(page, "a story")
        page.wait_for("!document.querySelector('#send').disabled")
    facts = page.eval(FACTS)
    assert [re.match(r"cut at max tokens · \d+ \+ (\d+) tokens", fact)[1] for fact in facts] == ["7", "7"]
    assert page.eval("document.querySelectorAll('.token').length") == 0
    page.eval("document.querySelector('#top_p').value = 7")
    ask(page, "again")
    assert page.eval("document.querySelectorAll('.message.user').length") == 2  # nothing was sent
    assert page.eval("document.activeElement.id") == "top_p"


def test_an_answer_follows_a_json_schema(page):
    ready(page)
    page.click("#structured")
    schema = {"enum": ["It is tall.", "It is small."]}
    page.eval(f"document.querySelector('#schema').value = {json.dumps(json.dumps(schema))}")
    page.eval("document.querySelector('#temperature').value = 0")
    ask(page, "Is the tree tall?")
    page.wait_for(f"{FACTS}.length === 1 || document.querySelector('.message.failed') !== null")
    assert json.loads(page.text(".message.assistant")) in schema["enum"]


def test_a_refusal_of_the_server_is_shown(page):
    ready(page)
    page.click("#structured")
    page.eval("document.querySelector('#schema').value = '{'")
    ask(page, "a person")
    assert "This is not JSON" in page.text("#schema-error")
    page.eval("document.querySelector('#schema').value = '{\"type\": 5}'")
    page.eval("document.querySelector('#prompt').focus()")
    page.press("Enter")
    page.wait_for("document.querySelectorAll('.message.failed').length === 1")
    assert page.text(".message.failed")
    # The conversation goes on without the refused message.
    page.click("#structured")
    ask(page, "a story")
    page.wait_for(f"{FACTS}.length === 1")


def test_the_engine_under_load(page, server):
    ready(page)
    with load(server, 60, 900):
        page.wait_for("document.querySelector('#running').textContent === '8'")
        page.wait_for("Number(document.querySelector('#waiting').textContent) > 0")
        page.wait_for("Number(document.querySelector('#blocks-2').textContent) > 8")
        page.wait_for(
            "Number(document.querySelector('#blocks-3').textContent) > 0"
        )  # their prompts begin alike
        page.wait_for("parseFloat(document.querySelector('#generation').textContent) > 0")
        # Large numbers are shown as 12.6k.
        page.wait_for("parseFloat(document.querySelector('#itl-count').textContent) > 0")
        page.wait_for("parseFloat(document.querySelector('#decode-tokens').textContent) > 0")
        blocks = sum(number(page, f"#blocks-{state}") for state in range(4))
        assert blocks == 600
        shares = [
            float(page.text(f"#share-{part}").split()[0]) for part in ("run", "plan", "deliver", "idle")
        ]
        assert 97 <= sum(shares) <= 103
        page.hover("#step-times")
        page.wait_for("document.querySelector('#step').textContent.startsWith('Step ')")
        assert re.search(r"\d+ decode tokens in \d+ rows; model [\d.]+ m?s", page.text("#step"))
    page.wait_for("document.querySelector('#running').textContent === '0'")
    page.wait_for("document.querySelector('#blocks-2').textContent === '0'")
    assert number(page, "#blocks-1") > 0


@pytest.mark.parametrize("view", ["chat", "engine"])
def test_nothing_is_wider_than_a_small_screen(page, view):
    ready(page)
    page.show(360, 740)
    page.click(f".views [data-view={view}]")
    shown = page.eval("['chat', 'engine'].filter((id) => document.getElementById(id).offsetParent !== null)")
    assert shown == [view]
    assert page.eval("document.documentElement.scrollWidth") == 360


def test_the_theme_follows_the_system_until_it_is_chosen(page):
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.eval(colour)
    page.show(1280, 900, dark=True)
    dark = page.eval(colour)
    assert light != dark
    page.click("#theme")
    assert (page.text("#theme"), page.eval(colour)) == ("Theme: light", light)
    page.click("#theme")
    page.show(1280, 900)
    assert (page.text("#theme"), page.eval(colour)) == ("Theme: dark", dark)
    page.click("#theme")
    assert (page.text("#theme"), page.eval(colour)) == ("Theme: system", light)


CONTRAST = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = ([r, g, b]) => {
    const linear = (v) => v <= 10 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4;
    const [x, y, z] = [r, g, b].map(linear);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const found = rgba(getComputedStyle(element).backgroundColor);
      if (found[3] === 255) return found;
    }
    return [255, 255, 255, 255];
  };
  const poor = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || element.offsetParent === null || element.disabled) continue;
    const both = [rgba(getComputedStyle(element).color), behind(element)].map(luminance);
    const ratio = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
    if (ratio < 4.5) poor.push(`${element.outerHTML.slice(0, 60)} ${ratio}`);
  }
  return poor;
})()"""
"""Elements whose text has less contrast than WCAG 2.2's level AA asks for (1.4.3)."""


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_contrast_and_controls_have_names(page, dark):
    ready(page)
    page.show(1280, 900, dark=dark)
    ask(page, "a story")
    page.wait_for(f"{FACTS}.length === 1")
    assert page.eval(CONTRAST) == []
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    controls = {"button", "textbox", "spinbutton", "checkbox", "combobox", "link", "img", "image"}
    unnamed = [
        node
        for node in nodes
        if not node["ignored"]
        and node["role"]["value"] in controls
        and not node.get("name", {}).get("value", "")
    ]
    assert unnamed == []


@pytest.mark.slow
def test_ranks_have_a_row_each(browser):
    """Two ranks and two HTTP processes: whichever answers has the steps and blocks of both."""
    server = Server(MODEL, *FLAGS, "--data-parallel-size", "2")
    rows = "[...document.querySelectorAll('#ranks tbody tr')].map((row) => row.innerText.split(/\\s+/))"
    try:
        with opened(browser, server) as page, load(server, 60, 900):
            ready(page)
            page.wait_for(f"{rows}.length === 2")
            page.wait_for(f"{rows}.every((row) => row[1] === 'up' && Number(row[2]) > 0)")
            for rank in ("0", "1"):
                page.eval(
                    f"(select => {{ select.value = '{rank}'; select.dispatchEvent(new Event('change')); }})"
                    "(document.querySelector('#rank'))"
                )
                page.wait_for("Number(document.querySelector('#blocks-2').textContent) > 0")
                page.wait_for("parseFloat(document.querySelector('#decode-tokens').textContent) > 0")
            running = sum(int(row[2]) for row in page.eval(rows))
            assert 2 <= running <= 16
    finally:
        server.stop()


@pytest.mark.slow
def test_the_key_is_asked_for_and_kept_in_the_tab(browser):
    server = Server(MODEL, *FLAGS, "--api-key", "secret")
    try:
        with opened(browser, server) as page:
            page.wait_for("document.querySelector('#key-dialog').open")
            assert page.eval("document.activeElement.id") == "key"
            page.type("wrong")
            page.press("Enter")
            page.wait_for("document.querySelector('#key-error').textContent !== ''")
            page.eval("document.querySelector('#key').value = ''")
            page.type("secret")
            page.press("Enter")
            ready(page)
            assert not page.eval("document.querySelector('#key-dialog').open")
            assert page.eval("sessionStorage.getItem('octavo-key')") == "secret"
            assert page.eval("document.cookie + JSON.stringify(localStorage)") == "{}"
            page.open(f"{server.url}/")
            ready(page)
            ask(page, "a story")
            page.wait_for(f"{FACTS}.length === 1")
    finally:
        server.stop()


def test_headers_allow_nothing_from_elsewhere(server):
    for path in ("/", "/page/main.js", "/page/style.css"):
        answer = httpx.get(server.url + path)
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy.pop("default-src") == "'none'"
        assert set(policy.values()) == {"'self'", "'none'"}
        again = httpx.get(server.url + path, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert httpx.get(f"{server.url}/page/main.py").status_code == 404


def test_screenshots(browser, server, request):
    """The page at rest, under load, in the dark, and on a small screen."""
    folder = os.environ.get("SCREENSHOTS")
    if folder is None:
        pytest.skip("SCREENSHOTS=folder has them written")
    pictures = request.config.invocation_params.dir / folder
    with opened(browser, server) as page:
        page.show(1280, 1010)
        page.open(f"{server.url}/")
        ready(page)
        page.wait_for("document.querySelector('#blocks-0').textContent !== '–'")
        page.screenshot(pictures / "empty.png")
        ask(page, "a story about a lighthouse")
        page.wait_for(f"{FACTS}.length === 1")
        with load(server, 60, 700):
            page.wait_for("Number(document.querySelector('#ttft-count').textContent) > 12")
            page.wait_for("Number(document.querySelector('#prefill-tokens').textContent) > 0")
            page.hover(".token.likely-1")
            page.screenshot(pictures / "load.png")
            page.hover("#step-times")
            page.show(1280, 1010, dark=True)
            page.wait_for("document.querySelector('#step').textContent.startsWith('Step ')")
            page.screenshot(pictures / "dark.png")
            page.show(360, 740)
            page.screenshot(pictures / "small-chat.png")
            page.click(".views [data-view=engine]")
            page.wait_for("document.querySelector('#blocks').width > 300")
            page.screenshot(pictures / "small-engine.png", whole=True)
