"""The site that `asv publish` builds, in a real browser: every benchmark's graph draws, with nothing to complain about.

It shows what asv_bench/results holds, or, where that or git's history is missing, made-up figures of three made-up
commits. Needs asv, playwright and a Chromium (CHROMIUM, or one on the PATH). The pages ask a content network for their
JavaScript; SITE_LIBRARIES names a node_modules folder that holds it instead, and then nothing is skipped.
HISTORY_PICTURE=FILE.png keeps a picture of the main graph.
"""

from __future__ import annotations

import functools
import http.server
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "asv_bench" / "results"
MAIN_GRAPH = "benchmarks.CudaBackward.track_gbps"
NODE_MODULES = os.environ.get("SITE_LIBRARIES")

# What the page asks for, without version and ".min", and where npm's packages have it.
LIBRARIES = {
    "jquery.js": "jquery/dist/jquery.min.js",
    "jquery.flot.js": "flot/jquery.flot.js",
    "jquery.flot.time.js": "flot/jquery.flot.time.js",
    "jquery.flot.selection.js": "flot/jquery.flot.selection.js",
    "jquery.flot.categories.js": "flot/jquery.flot.categories.js",
    "jquery.flot.orderBars.js": "flot-orderbars/js/jquery.flot.orderBars.js",
    "stupidtable.js": "stupid-table-plugin/stupidtable.min.js",
    "md5.js": "blueimp-md5/js/md5.min.js",
    "bootstrap.js": "bootstrap/dist/js/bootstrap.min.js",
    "bootstrap.css": "bootstrap/dist/css/bootstrap.min.css",
}

# flot keeps its plot beside the element; a point is [x, y], and y is null where a commit has no figure.
POINTS_DRAWN = """() => {
    const plot = $('#main-graph').data('plot');
    const canvas = document.querySelector('#main-graph canvas.flot-base');
    if (!plot || !canvas || !canvas.width) return 0;
    if (!canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(value => value)) return 0;
    return plot.getData().flatMap(series => series.data).filter(point => point && point[1] !== null).length;
}"""


def missing(reason: str) -> NoReturn:
    """A reason to skip, but not where the caller has prepared everything."""
    if NODE_MODULES:
        pytest.fail(reason)
    pytest.skip(reason)


def asv(*arguments: str, cwd: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ASV_PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "asv", *arguments],
        cwd=cwd, capture_output=True, text=True, env=environment, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def git(*arguments: str, cwd: Path) -> str:
    command = ["git", "-c", "user.name=n", "-c", "user.email=e", "-c", f"safe.directory={cwd}", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout.strip()


def result_files(folder: Path) -> list[dict[str, Any]]:
    files = (path for path in folder.glob("*/*.json") if path.name != "machine.json")
    return [json.loads(path.read_text(encoding="utf-8")) for path in files]


def is_recorded() -> bool:
    """Whether there are results, of commits that git knows."""
    hashes = {result["commit_hash"] for result in result_files(RESULTS)}
    try:
        return bool(hashes) and hashes <= set(git("rev-list", "main", cwd=ROOT).split())
    except (OSError, subprocess.CalledProcessError):
        return False


def with_figures(results: list[dict[str, Any]]) -> set[str]:
    """The benchmarks that some commit has a figure of; a machine without a GPU has none of CUDA's."""
    return {
        name
        for result in results
        for name, columns in result["results"].items()
        if any(figure is not None and not math.isnan(figure) for figure in columns[0] or [])
    }


def make_up_results(folder: Path) -> None:
    """A repository with three commits, and for each a figure of every benchmark that asv finds in asv_bench."""
    git("init", "-q", "-b", "main", cwd=folder)
    for message in "one", "two", "three":
        git("commit", "-q", "--allow-empty", "-m", message, cwd=folder)
    config = {
        "version": 1, "project": "cupynorm", "repo": ".", "branches": ["main"], "environment_type": "virtualenv",
        "benchmark_dir": str(ROOT / "asv_bench"), "results_dir": "results",
    }  # fmt: skip
    (folder / "asv.conf.json").write_text(json.dumps(config))
    machine = {name: "made up" for name in ("arch", "cpu", "gpu", "num_cpu", "os", "ram")} | {"machine": "made-up"}
    (folder / "results" / "made-up").mkdir(parents=True)
    (folder / "results" / "made-up" / "machine.json").write_text(json.dumps(machine | {"version": 1}))
    discover = (
        "from asv.config import Config; from asv.benchmarks import Benchmarks; from asv.repo import get_repo;"
        "from asv.environment import get_environments;"
        "conf = Config.load('asv.conf.json'); repo = get_repo(conf);"
        f"environments = list(get_environments(conf, ['existing:{sys.executable}']));"
        "Benchmarks.discover(conf, repo, environments, [repo.get_hash_from_name('main')]).save()"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ASV_PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", discover], cwd=folder, env=environment, check=True, timeout=120)
    about = json.loads((folder / "results" / "benchmarks.json").read_text())
    for number, commit in enumerate(git("rev-list", "--reverse", "main", cwd=folder).split(), 1):
        results = {
            name: [
                [number + place for place, _ in enumerate(itertools.product(*b["params"]))],
                b["params"],
                b["version"],
            ]
            for name, b in about.items()
            if name != "version"
        }
        result = {
            "commit_hash": commit, "date": 86_400_000 * number, "env_name": "existing", "env_vars": {},
            "params": machine | {"python": "3"}, "python": "3", "requirements": {}, "durations": {},
            "result_columns": ["result", "params", "version"], "results": results, "version": 2,
        }  # fmt: skip
        (folder / "results" / "made-up" / f"{commit[:8]}-existing.json").write_text(json.dumps(result))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, set[str]]]:
    """The address of the published site, served from this process, and the benchmarks that have figures."""
    try:
        import asv as _  # noqa: F401
    except ImportError:
        missing("asv is not installed")
    folder = tmp_path_factory.mktemp("site")
    html = folder / "html"
    config, results = ROOT / "asv.conf.json", RESULTS
    if not is_recorded():
        make_up_results(folder)
        config, results = folder / "asv.conf.json", folder / "results"
    asv("publish", "--no-pull", "--config", str(config), "--html-dir", str(html), cwd=config.parent)
    if NODE_MODULES:
        use_local_libraries(html, Path(NODE_MODULES))

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(html))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", with_figures(result_files(results))
        server.shutdown()


def use_local_libraries(html: Path, node_modules: Path) -> None:
    def local(match: re.Match[str]) -> str:
        name = match[2].rpartition("/")[2].replace(".min", "")
        return f'{match[1]}="libraries/{LIBRARIES[re.sub(r"-[0-9.]+(?=[.]js)", "", name)]}"'

    (html / "libraries").symlink_to(node_modules.resolve(), target_is_directory=True)
    index = html / "index.html"
    text = re.sub(r'(src|href)="(https://[^"]+\.(?:js|css))"', local, index.read_text(encoding="utf-8"))
    index.write_text(re.sub(r' integrity="[^"]+"', "", text), encoding="utf-8")


@pytest.fixture(scope="module")
def browser(site: tuple[str, set[str]]) -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    chromium = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        missing("there is no Chromium: none on the PATH, and CHROMIUM does not name one")
    flags = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"]
    flags += ["--no-sandbox"] if getattr(os, "geteuid", lambda: 1)() == 0 else []
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=flags)
        page = opened.new_page()
        page.goto(site[0])
        if page.url.endswith("error.html"):
            missing("the site's JavaScript libraries cannot be fetched; SITE_LIBRARIES can name a copy")
        yield opened
        opened.close()


def open_page(browser: Any, address: str) -> tuple[Any, list[str]]:
    """A page, and what its console goes on to complain about."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.set_default_timeout(20_000)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(address)
    return page, complaints


def test_every_graph_draws(site: tuple[str, set[str]], browser: Any) -> None:
    address, names = site
    assert "benchmarks.Import.timeraw_import" in names  # available everywhere
    faults = []
    for name in sorted(names):
        page, complaints = open_page(browser, f"{address}/#{name}")
        try:
            page.wait_for_function(POINTS_DRAWN)
        except Exception as error:  # playwright's own timeout, or a page that is broken otherwise
            faults.append(f"{name}: no points: {str(error).splitlines()[0]}")
        if name == MAIN_GRAPH and (picture := os.environ.get("HISTORY_PICTURE")):
            page.wait_for_timeout(500)
            page.screenshot(path=picture)
        faults += [f"{name}: {complaint}" for complaint in complaints]
        page.close()
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("overview", ["#/", "#/summarylist", "#/regressions"])
def test_overviews_open(overview: str, site: tuple[str, set[str]], browser: Any) -> None:
    page, complaints = open_page(browser, f"{site[0]}/{overview}")
    page.wait_for_load_state("networkidle")
    page.wait_for_function("() => $('div[id$=-display]:visible').text().trim().length > 0")
    page.close()
    assert not complaints
