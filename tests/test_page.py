"""The chat page in a real Chromium, against a scripted server; its own headers are the real ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from chromium import Browser, chromium_or_skip
from headrace.server.page import load_page

PATIENCE_S = 60
"""How long a scripted answer waits for its test before it gives up; only a broken test sees it."""

Step = bytes | threading.Event
STAGES = {
    "receive": 0.1,
    "route": 0.2,
    "tokenize": 1,
    "queue": 5,
    "restore": 0.5,
    "prefill": 180,
    "sample": 12.3,
    "deliver": 1,
}
TIMELINE = STAGES | {"ttft": 200.1, "cached_tokens": 37}


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def text(content: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": None}]})


END = (
    event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "headrace": {"timeline": TIMELINE}})
    + event({"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": 9, "total_tokens": 49}})
    + b"data: [DONE]\n\n"
)


class Refusal:
    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message


class Stub(ThreadingHTTPServer):
    """Plays one script a question: bytes are written, an event is waited for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.scripts: list[list[Step] | Refusal] = []
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.key: str | None = None
        self.left = threading.Event()
        """A client hung up while its script waited for that."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def log_message(self, format: str, *args: object) -> None: ...

    def do_GET(self) -> None:
        page = load_page()
        assert page is not None
        if self.path == "/":
            self._answer(200, page.body, "text/html; charset=utf-8", page.headers)
        elif self._allowed():
            self._answer(200, json.dumps({"object": "list", "data": [{"id": "tiny"}]}).encode(), "application/json")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if not self._allowed():
            return
        self.server.asked.append(json.loads(body))
        script = self.server.scripts.pop(0)
        if isinstance(script, Refusal):
            self._refuse(script)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.end_headers()
        for step in script:
            if step is self.server.left:
                self.connection.recv(1)  # nothing comes but the end
                self.server.left.set()
            elif isinstance(step, threading.Event):
                assert step.wait(PATIENCE_S)
            else:
                self.wfile.write(step)

    def _allowed(self) -> bool:
        self.server.keys.append(self.headers["authorization"])
        if self.server.key in (None, self.headers["authorization"]):
            return True
        self._refuse(Refusal(401, "the key is wrong"))
        return False

    def _refuse(self, refusal: Refusal) -> None:
        body = json.dumps({"error": {"message": refusal.message, "type": "x", "param": None, "code": None}}).encode()
        self._answer(refusal.status, body, "application/json")

    def _answer(self, status: int, body: bytes, kind: str, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        self.send_response(status)
        for name, value in ((b"content-type", kind.encode()), (b"content-length", b"%d" % len(body)), *headers):
            self.send_header(name.decode(), value.decode())
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser(chromium_or_skip()) as browser:
        browser.command(
            "Page.addScriptToEvaluateOnNewDocument",
            source="window.violations = []; addEventListener('securitypolicyviolation', "
            "(event) => violations.push(event.violatedDirective)); addEventListener('error', (event) => "
            "violations.push(event.message)); addEventListener('unhandledrejection', (event) => "
            "violations.push(String(event.reason)));",
        )
        yield browser


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub() as stub:
        thread = threading.Thread(target=stub.serve_forever, args=(0.01,))
        thread.start()
        yield stub
        stub.shutdown()
        thread.join()


@pytest.fixture
def page(browser: Browser, stub: Stub) -> Iterator[Browser]:
    browser.open(stub.url)
    browser.run("sessionStorage.clear()")
    browser.wait("$('model').value === 'tiny'")
    yield browser
    assert browser.run("violations") == []


def ask(page: Browser, question: str) -> None:
    page.run("$('prompt').focus()")
    page.type(question)
    page.press("Enter")


def idle(page: Browser) -> None:
    page.wait("document.body.dataset.state === 'idle' && !document.querySelector('[aria-busy=true]')")


def answers(page: Browser) -> list[str]:
    got: list[str] = page.run("[...document.querySelectorAll('.assistant .text')].map((one) => one.textContent)")
    return got


# --- against the server


def test_an_answer_is_streamed(page: Browser, stub: Stub) -> None:
    more = threading.Event()
    stub.scripts = [[text("Once"), more, text(" upon a time."), END]]
    ask(page, "  Tell me. ")
    page.wait("document.querySelector('.assistant .text').textContent === 'Once'")
    assert page.run("document.body.dataset.state") == "answering"
    assert page.run("document.querySelector('.user .text').textContent") == "Tell me."
    more.set()
    idle(page)
    assert answers(page) == ["Once upon a time."]
    assert page.run("$('status').textContent") == "Answer complete."
    assert stub.asked[0] == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Tell me."}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "headrace": {"timings": True},
    }


def test_the_conversation_goes_along(page: Browser, stub: Stub) -> None:
    stub.scripts = [[text("One."), END], [text("Two."), END]]
    ask(page, "1?")
    idle(page)
    ask(page, "2?")
    idle(page)
    assert stub.asked[1]["messages"] == [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "One."},
        {"role": "user", "content": "2?"},
    ]


def test_a_new_chat_forgets_the_old_one_even_in_the_middle(page: Browser, stub: Stub) -> None:
    stub.scripts = [[text("One"), stub.left], [text("Two."), END]]
    ask(page, "1?")
    page.wait("document.querySelector('.assistant .text').textContent === 'One'")
    page.run("$('new').click()")
    assert page.run("$('log').childElementCount") == 0
    ask(page, "2?")
    idle(page)
    assert stub.asked[1]["messages"] == [{"role": "user", "content": "2?"}]
    assert answers(page) == ["Two."]


def test_bytes_may_come_one_by_one(page: Browser, stub: Stub) -> None:
    body = text("naïve 🔥 \u2028 ok") + b": hb\n\n" + END
    stub.scripts = [[body[i : i + 1] for i in range(len(body))]]
    ask(page, "?")
    idle(page)
    assert answers(page) == ["naïve 🔥 \u2028 ok"]


def test_markup_stays_text(page: Browser, stub: Stub) -> None:
    evil = "<img src=x onerror=\"violations.push('ran')\"><b>&amp;</b>"
    stub.scripts = [[text(evil), END]]
    ask(page, evil)
    idle(page)
    assert answers(page) == [evil]
    assert page.run("document.querySelectorAll('#log img, #log b').length") == 0


def test_stop_keeps_the_text_and_hangs_up(page: Browser, stub: Stub) -> None:
    stub.scripts = [[text("Half an"), stub.left], [text("More."), END]]
    ask(page, "1?")
    page.wait("document.querySelector('.assistant .text').textContent === 'Half an'")
    page.run("$('stop').click()")
    idle(page)
    assert stub.left.wait(PATIENCE_S)
    assert answers(page) == ["Half an"]
    assert page.run("document.querySelector('.error')") is None
    assert page.run("document.activeElement.id") == "prompt"
    ask(page, "2?")
    idle(page)
    assert [message["content"] for message in stub.asked[1]["messages"]] == ["1?", "Half an", "2?"]


def test_escape_stops_before_the_first_word_and_leaves_no_turn(page: Browser, stub: Stub) -> None:
    stub.scripts = [[stub.left], [text("Yes."), END]]
    ask(page, "1?")
    page.wait("document.querySelector('.waiting')")
    page.press("Escape")
    idle(page)
    ask(page, "2?")
    idle(page)
    assert answers(page) == ["Yes."]
    assert stub.asked[-1]["messages"] == [{"role": "user", "content": "2?"}]


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        (event({"error": {"message": "the engine failed"}}), "the engine failed"),
        (b"", "The connection ended before the answer did."),
        (b"data: [DONE]", "The connection ended before the answer did."),
    ],
)
def test_a_broken_answer_keeps_its_text_and_can_be_repeated(
    page: Browser, stub: Stub, tail: bytes, message: str
) -> None:
    stub.scripts = [[text("Half"), tail], [text("Whole."), END]]
    ask(page, "1?")
    idle(page)
    assert answers(page) == ["Half"]
    assert page.run("document.querySelector('.error span').textContent") == message
    page.run("document.querySelector('.error button').click()")
    idle(page)
    assert answers(page) == ["Half", "Whole."]
    assert stub.asked[1]["messages"] == [{"role": "user", "content": "1?"}]


def test_a_refusal_shows_the_servers_own_words(page: Browser, stub: Stub) -> None:
    stub.scripts = [Refusal(503, "the queue is full: 256 of 256"), [text("Now."), END]]
    ask(page, "1?")
    idle(page)
    assert page.run("document.querySelector('.error span').textContent") == "the queue is full: 256 of 256"
    page.run("document.querySelector('.error button').click()")
    idle(page)
    assert answers(page) == ["Now."]
    assert page.run("document.querySelectorAll('.user').length") == 1


def test_a_key_is_asked_for_kept_and_sent(browser: Browser, stub: Stub) -> None:
    stub.key = "Bearer sesame"
    stub.scripts = [[text("In."), END]]
    browser.open(stub.url)
    browser.wait("!$('key-form').hidden")
    assert browser.run("document.activeElement.id") == "key"
    browser.type("wrong")
    browser.press("Enter")
    browser.wait("!$('key-form').hidden && $('key').value === ''")
    browser.type("sesame")
    browser.press("Enter")
    browser.wait("$('model').value === 'tiny'")
    ask(browser, "?")
    idle(browser)
    assert answers(browser) == ["In."]
    assert browser.run("sessionStorage.getItem('headrace-key')") == "sesame"
    assert browser.run("localStorage.length") == 0
    browser.run("sessionStorage.clear()")


def test_a_key_that_stops_working_is_asked_for_and_the_question_repeated(page: Browser, stub: Stub) -> None:
    stub.key = "Bearer new"
    stub.scripts = [[text("In."), END]]
    ask(page, "?")
    page.wait("!$('key-form').hidden")
    page.type("new")
    page.press("Enter")
    page.wait("document.querySelector('.assistant .text')?.textContent === 'In.'")
    idle(page)
    assert page.run("document.querySelectorAll('article').length") == 2


def test_the_waterfall_shows_the_stages(page: Browser, stub: Stub) -> None:
    stub.scripts = [[text("One"), text(" two"), END]]
    ask(page, "?")
    idle(page)
    summary = page.run("document.querySelector('.timing summary').textContent")
    assert summary.startswith("TTFT 200 ms · 9 tokens")
    bar = page.run("[...document.querySelectorAll('.bar i')].map((one) => [one.dataset.stage, +one.style.flexGrow])")
    assert dict(bar) == STAGES
    assert [name for name, _ in bar] == list(STAGES)
    terms = page.run("[...document.querySelectorAll('dt')].map((one) => one.textContent)")
    assert terms == [*STAGES, "in this browser", "prompt tokens reused"]
    widths = dict(
        page.run("[...document.querySelectorAll('.bar i')].map((one) => [one.dataset.stage, one.offsetWidth])")
    )
    assert widths["prefill"] > widths["sample"] > widths["queue"]


# --- the keyboard


def test_shift_enter_starts_a_new_line(page: Browser, stub: Stub) -> None:
    stub.scripts = [[text("Ok."), END]]
    page.run("$('prompt').focus()")
    page.type("a")
    page.press("Enter", shift=True)
    page.type("b")
    assert stub.asked == []
    page.press("Enter")
    idle(page)
    assert stub.asked[0]["messages"][0]["content"] == "a\nb"
    assert page.run("$('prompt').value") == ""


def test_enter_does_nothing_while_composing_answering_or_empty(page: Browser, stub: Stub) -> None:
    stub.scripts = [[text("One"), stub.left]]
    ask(page, " ")
    page.type("か")
    page.run(
        "$('prompt').dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', isComposing: true, bubbles: true}))"
    )
    assert page.run("document.body.dataset.state") == "idle"
    page.press("Enter")
    page.wait("document.querySelector('.assistant .text')?.textContent === 'One'")
    ask(page, "next")
    assert page.run("$('prompt').value") == "next"
    page.run("$('stop').click()")
    idle(page)
    assert len(stub.asked) == 1


# --- inside the page, piece by piece

FEED = """
new Promise((done) => {
  let out;
  window.fetch = async () => new Response(new ReadableStream({start: (one) => { out = one; }}));
  const write = Writer.prototype.write;
  let writes = 0;
  Writer.prototype.write = function (text) { write.call(this, text); writes += 1; look?.(); };
  let look = null;
  window.frames_ = [];
  window.requestAnimationFrame = (frame) => frames_.push(frame);
  window.cancelAnimationFrame = () => {};
  window.pushed = (texts) => new Promise((done) => {
    const goal = writes + texts.length;
    look = () => { if (writes >= goal) done(); };
    for (const text of texts) {
      const data = JSON.stringify({choices: [{delta: {content: text}}]});
      out.enqueue(new TextEncoder().encode(`data: ${data}\\n\\n`));
    }
  });
  window.ended = () => { out.enqueue(new TextEncoder().encode("data: [DONE]\\n\\n")); out.close(); };
  done();
})
"""


def test_the_first_text_is_shown_at_once_and_the_rest_once_a_frame(page: Browser) -> None:
    page.run(FEED)
    ask(page, "?")
    page.run("pushed(['a'])")
    assert answers(page) == ["a"]
    page.run("pushed([...'bcdefghij'])")
    assert answers(page) == ["a"]
    assert page.run("frames_.length") == 1
    page.run("frames_.pop()()")
    assert answers(page) == ["abcdefghij"]
    page.run("pushed(['k'])")
    page.run("ended()")
    idle(page)
    assert answers(page) == ["abcdefghijk"]


def test_a_hidden_page_does_not_wait_for_frames(page: Browser) -> None:
    page.run(FEED)
    ask(page, "?")
    page.run("pushed([...'ab'])")
    assert answers(page) == ["a"]
    page.run(
        "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    assert answers(page) == ["ab"]
    page.run("pushed(['c'])")
    assert answers(page) == ["abc"]
    page.run("ended()")
    idle(page)


def test_it_scrolls_along_only_from_the_bottom(page: Browser) -> None:
    page.run(FEED)
    ask(page, "?")
    page.run(r"pushed(['line\n'.repeat(200)])")
    assert page.run("atBottom()") is True
    page.run("scroller.scrollTop = 100")
    page.run(r"pushed(['line\n'.repeat(200)])")
    page.run("frames_.pop()()")
    assert page.run("scroller.scrollTop") == 100
    page.run("ended()")
    idle(page)
    assert page.run("scroller.scrollTop") == 100


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_the_parser_survives_every_cut(page: Browser, end: str) -> None:
    lines = [
        "\ufeff: a comment",
        "data: one",
        "",
        ":",
        "event: x",
        "data:two",
        "data",
        "data:  three",
        "id: 7",
        "",
        "",
        "data: é🔥",
    ]
    wire = end.join([*lines, "", "data: never ended"])
    got = page.run(
        f"""(() => {{
          const bytes = new TextEncoder().encode({json.dumps(wire)});
          return Array.from({{length: bytes.length}}, (_, i) => i + 1).map((size) => {{
            const events = [], decoder = new TextDecoder(), parser = new EventParser((data) => events.push(data));
            for (let i = 0; i < bytes.length; i += size)
              parser.feed(decoder.decode(bytes.slice(i, i + size), {{stream: true}}));
            return events;
          }});
        }})()"""
    )
    assert all(events == ["one", "two\n\n three", "é🔥"] for events in got)


def test_nothing_is_loaded_from_elsewhere(page: Browser, stub: Stub) -> None:
    loaded = page.run("performance.getEntriesByType('resource').map((one) => one.name)")
    assert loaded == [stub.url + "v1/models"]
