"""The live page in a real browser: signing in, strangers' names, news, silence, and how it looks and reads."""

import re
from collections.abc import Iterator

import pytest
from selenium.webdriver.common.keys import Keys

from lora_core.errors import EngineError
from lora_core.workload import AdapterWork, SlotCounts, Workload
from tests.serve.browser import Browser, chromium
from tests.serve.page_server import OPERATOR_KEY, TENANT_KEY, PageServer, page_server

HOSTILE = ("<script>owned()</script>", '"><b>bold</b><i>', "</template><h1>gone</h1>", "{{7*7}} &lt;p&gt;")
HOSTILE_PATH = "/<img src=x onerror=document.title='owned'>"
STALLED = "adapter 'sql': its oldest request has made no progress for 61.0 s (watchdog.adapter_deadline_s is 60)"
LONGEST = "team/" + "a-very-long-name-" * 14


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def server() -> Iterator[PageServer]:
    with page_server() as running:
        yield running


def sign_in(browser: Browser, server: PageServer, key: str = OPERATOR_KEY) -> None:
    """Open the page as somebody new, and give it a key."""
    browser.open(server.url)
    browser.run("sessionStorage.clear()")
    browser.open(server.url)
    give_key(browser, key)


def give_key(browser: Browser, key: str) -> None:
    browser.eventually(lambda: browser.texts("#sign-in button") == ["Look at the fleet"])
    browser.driver.find_element("id", "key").send_keys(key + Keys.ENTER)


def is_live(browser: Browser) -> bool:
    return browser.text("#connection-text") == "● Live"


def row(browser: Browser, table: str, name: str) -> str:
    """The text of the table's row whose head begins with this, in one line and without its mark."""
    rows = [" ".join(text.split()).lstrip("■◔…○ ") for text in browser.texts(f"{table} tbody tr")]
    return next((text for text in rows if text.startswith(name)), "")


def faults(browser: Browser) -> list[str]:
    """Errors of the page's own, which a refusal of the key is not."""
    return [error for error in browser.errors() if "/v1/fleet/events" not in error]


def test_only_an_operators_key_opens_it_and_stays_where_it_is_safe(browser: Browser, server: PageServer) -> None:
    server.start_replica("r0")
    server.load("mine")
    browser.open(server.url)
    browser.eventually(lambda: browser.text("#connection-text") == "Signed out")
    assert browser.text("#sign-in-why") == ""
    give_key(browser, "nobodys-key-0123456789")
    browser.eventually(lambda: "this key is nobody's" in browser.text("#sign-in-why"))
    give_key(browser, TENANT_KEY)
    browser.eventually(lambda: "needs the fleet's operator key" in browser.text("#sign-in-why"))
    assert "mine" not in browser.text()
    give_key(browser, OPERATOR_KEY)
    browser.eventually(lambda: is_live(browser) and "mine" in browser.text("#adapters"))
    assert browser.driver.current_url == server.url, "no address ever has the key"
    assert browser.driver.get_cookies() == []
    assert OPERATOR_KEY in browser.run("return JSON.stringify(sessionStorage)")
    assert browser.run("return localStorage.length") == 0
    assert OPERATOR_KEY not in browser.run("return document.documentElement.outerHTML")
    browser.open(server.url)
    browser.eventually(lambda: is_live(browser))
    browser.driver.find_element("id", "sign-out").click()
    browser.eventually(lambda: browser.texts("#sign-in button") != [])
    assert "mine" not in browser.run("return document.body.innerText")
    assert OPERATOR_KEY not in browser.run("return JSON.stringify(sessionStorage)")
    assert faults(browser) == []


def test_names_and_errors_of_strangers_are_text(browser: Browser, server: PageServer) -> None:
    server.start_replica("r0")
    for name in (*HOSTILE, LONGEST):
        server.load(name)
    # Refused, in words that repeat it.
    server.load(HOSTILE[0], HOSTILE_PATH)
    server.hold("r0", *HOSTILE[:3], loading=(HOSTILE[3],))
    sign_in(browser, server)
    browser.eventually(lambda: len(browser.texts("#replicas tbody tr")) == 4)
    heads = browser.run("return [...document.querySelectorAll('#adapters [data-field=name]')].map(e => e.textContent)")
    assert {*HOSTILE, LONGEST} <= set(heads)
    heads = browser.run("return [...document.querySelectorAll('article [data-field=name]')].map(e => e.textContent)")
    assert set(HOSTILE) <= set(heads)
    assert HOSTILE_PATH in browser.text("#errors")
    server.unload(HOSTILE[1])
    browser.eventually(lambda: f"Adapter {HOSTILE[1]} is gone" in browser.text("#changes"))
    found = browser.run("return [...document.querySelectorAll('img, b, script, main h1')].map(e => e.tagName)")
    assert found == ["SCRIPT"]
    assert browser.driver.title.endswith("replicas - Fleet")
    assert faults(browser) == []


def test_what_happens_is_seen_and_said(browser: Browser, server: PageServer) -> None:
    server.start_replica("r0")
    server.start_replica("r1")
    sign_in(browser, server)
    browser.eventually(lambda: browser.texts("article h3") == ["r0", "r1"])
    assert browser.texts("article .badge") == ["✓ serving", "✓ serving"]
    server.load("mine")
    browser.eventually(lambda: "✓ ready" in row(browser, "#adapters", "mine"))
    assert "Adapter mine: ready" in browser.text("#changes")
    assert "0 % 0 of 2" in row(browser, "#adapters", "mine")
    server.hold("r0", loading=("mine",))
    browser.eventually(lambda: "replica r0" in row(browser, "#loads", "mine"))
    server.hold("r0", "mine")
    browser.eventually(lambda: "0 % 1 of 2" in row(browser, "#adapters", "mine"))
    assert browser.texts("#loads") == []
    browser.eventually(lambda: re.search(r"\b[1-9] s$", row(browser, "article", "mine")) is not None)
    server.work("r0", Workload(adapters=[AdapterWork(name="mine", num_tokens=75, num_running=2, num_waiting=1)]))
    browser.eventually(lambda: "2 + 1" in row(browser, "article", "mine"))
    browser.eventually(lambda: "100 %" in row(browser, "article", "mine"))
    server.load("broken")
    browser.eventually(lambda: "rank is 512" in row(browser, "#errors", "broken"))
    assert "Error of broken: " in browser.text("#changes")
    server.kill_replica("r1")
    browser.eventually(lambda: browser.texts("article h3") == ["r0"])
    assert "Replica r1 is gone" in browser.text("#changes")
    server.start_replica("r1")
    browser.eventually(lambda: browser.texts("article h3") == ["r0", "r1"])
    assert "Replica r1 came" in browser.text("#changes")
    server.unload("mine")
    browser.eventually(lambda: row(browser, "#adapters", "mine") == "")


def test_silence_is_said_and_ends_by_itself(browser: Browser, server: PageServer) -> None:
    server.start_replica("r0")
    sign_in(browser, server)
    browser.eventually(lambda: is_live(browser))
    server.fault = EngineError("the router actor does not answer within 5 s")
    browser.eventually(lambda: "▲ Stale: the router actor does not answer" in browser.text("#connection"))
    assert browser.texts("article h3") == ["r0"], "what was last known is still there"
    browser.eventually(lambda: re.search(r"last news \d+ s ago", browser.text("#connection")) is not None)
    server.fault = None
    browser.eventually(lambda: is_live(browser))
    server.stop()
    browser.eventually(lambda: "▲ Stale: the server cannot be reached" in browser.text("#connection"))
    assert browser.driver.title.startswith("(stale)")
    server.start_replica("r1")
    server.start()
    browser.eventually(lambda: is_live(browser) and browser.texts("article h3") == ["r0", "r1"])
    assert "Replica r1 came" in browser.text("#changes"), "also what happened meanwhile"
    browser.open("about:blank")

    def asked_nothing() -> bool:
        before = server.num_asked
        browser.run("return new Promise(resolve => setTimeout(resolve, 1000))")
        return server.num_asked == before

    browser.eventually(asked_nothing)


@pytest.fixture
def busy(server: PageServer) -> PageServer:
    """Three replicas, of which one is stalled, and much to see."""
    names = ["support", "legal/contracts@3", "sql", "pirate", "json", "telegram", "acme/summaries", LONGEST]
    for replica in ("q7f3ka2b", "m0x91hzt", "w4d8c6ye"):
        server.start_replica(replica)
    for name in names:
        server.load(name)
    server.run(server.router.pin("support"))
    server.load("next", "/models/next")
    server.load("broken")
    held = {"q7f3ka2b": names[:6], "m0x91hzt": [names[7], names[0], names[2]], "w4d8c6ye": [names[1], names[6]]}
    for number, (replica, slots) in enumerate(held.items()):
        server.hold(replica, *slots, loading=(names[6],) if number == 0 else (), num_changing=number % 2)
        work = [
            AdapterWork(
                name=name, num_tokens=4000 // (place + 1), num_started=8, num_running=3 - place, num_waiting=place
            )
            for place, name in enumerate(slots[:4])
        ]
        counts = SlotCounts(num_hits=1204, num_misses=57, num_evictions=31, num_loads={"host": 40, "disk": 17})
        work.append(AdapterWork(num_running=1))
        server.work(replica, Workload(adapters=work, slots=counts, stalled={"sql": STALLED} if number == 1 else {}))
    return server


def test_it_is_readable_by_everyone(browser: Browser, busy: PageServer) -> None:
    sign_in(browser, busy)
    browser.eventually(lambda: len(browser.texts("article")) == 3 and " %" in row(browser, "article", "support"))
    try:
        for device, width in (("desk", 1280), ("phone", 360)):
            for scheme in ("light", "dark"):
                browser.set_screen(width, 900, dark=scheme == "dark", is_phone=device == "phone")
                browser.screenshot(f"{device}-{scheme}")
                assert browser.run("return document.documentElement.scrollWidth") <= width
                assert browser.faint_texts() == []
        browser.command("Emulation.setEmulatedVisionDeficiency", type="achromatopsia")
        browser.screenshot("phone-without-colour")
    finally:
        browser.command("Emulation.setEmulatedVisionDeficiency", type="none")
        browser.command("Emulation.clearDeviceMetricsOverride")
    # What colours say is said in words and shapes, too.
    assert browser.texts("article .badge") == ["✓ serving", "▲ serving, not all", "✓ serving"]
    places = browser.run("return [...document.querySelectorAll('.strip i')].map(i => i.dataset.place)")
    assert {"slot", "change", "free"} == set(places)
    assert len(places) == 24


def test_a_screen_reader_and_a_keyboard_find_their_way(browser: Browser, busy: PageServer) -> None:
    sign_in(browser, busy)
    browser.eventually(lambda: len(browser.texts("article")) == 3)
    nodes = browser.accessible()
    tables = {name for role, name in nodes if role == "table"}
    assert {"Adapters", "Last errors", "Loads in progress", "Adapters on replica q7f3ka2b"} <= tables
    columns = {name for role, name in nodes if role == "columnheader"}
    assert {"Adapter", "Heat", "Run + wait", "Age", "State", "Share"} <= columns
    assert [name for role, name in nodes if role == "rowheader" and name.startswith("pirate")]
    headings = [name for role, name in nodes if role == "heading"]
    assert headings[:3] == ["Fleet", "Now", "Replicas"]
    assert {("status", ""), ("log", "Changes seen here")} <= {node for node in nodes if node[0] in ("status", "log")}
    assert browser.run("return document.querySelector('[role=log]').ariaLive") == "polite"
    browser.open(busy.url)
    browser.eventually(lambda: is_live(browser))
    reached = []
    for _ in range(2):
        browser.driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(browser.run("return document.activeElement.innerText"))
    assert reached == ["Skip to the replicas", "Sign out"]
    assert browser.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
