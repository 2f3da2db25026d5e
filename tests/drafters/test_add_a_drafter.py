"""Methods of other packages: the example of `docs/add-a-drafter.md`, as its reader would install it, and bad ones."""

import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tiny
from drafters import test_contract, test_contract_law, test_contract_state
from drafters.contract import Case, Target, llama
from drafters.watching import held
from engine.running import plain

from paceline.core.params import SamplingParams
from paceline.decode import decode
from paceline.drafters import registry
from paceline.drafters.base import create_drafter
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.stateless import Stateless
from paceline.engine.llm import LLM
from paceline.errors import PacelineError
from paceline.models.load import LoadedModel, load_model

DOCUMENT = (Path(__file__).parents[2] / "docs/add-a-drafter.md").read_text()
TOML, FILE, USE = (code for _, code in re.findall(r"^```(toml|python)\n(.*?)^```", DOCUMENT, re.DOTALL | re.MULTILINE))
TEXT, PARAMS = "abcabcabcab", SamplingParams(temperature=0, max_tokens=20)


def install(site: Path, package: str, points: dict[str, str], **files: str) -> None:
    """What pip would leave in site-packages."""
    info = site / f"{package.replace('-', '_')}-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n")
    lines = [f"[{registry.GROUP}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for module, text in files.items():
        (site / f"{module}.py").write_text(text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for packages; what is imported from it is forgotten again."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def example(site: Path) -> None:
    project = tomllib.loads(TOML)["project"]
    install(site, project["name"], project["entry-points"][registry.GROUP], paceline_cycle=FILE)


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path) -> LoadedModel:
    return load_model(str(tiny_llama_dir), dtype="fp32")


@pytest.mark.usefixtures("example")
def test_the_documents_example_drafts(model: LoadedModel) -> None:
    values = {"method": "cycle", "cycle_period": 3, "num_speculative_tokens": 6}
    config = SpeculativeConfig.from_dict(values)
    drafter = create_drafter(config, model)
    assert drafter.period == 3  # type: ignore[attr-defined]
    prompt = tiny.prompt(20)
    steps = list(decode(model.decoder, prompt, PARAMS, drafter, 6))
    assert [t for step in steps for t in step.token_ids] == plain(model.decoder, prompt, PARAMS)
    assert sum(step.num_draft_tokens for step in steps) > 0

    answer = LLM(model, values).generate(TEXT, PARAMS)[0]
    assert answer.outputs[0].token_ids == LLM(model).generate(TEXT, PARAMS)[0].outputs[0].token_ids
    assert answer.metrics.speculation.num_draft_tokens > 0
    composite = {"methods": ["ngram", {"method": "cycle", "cycle_period": 2}]}
    answer = LLM(model, composite).generate("a quick brown fox", PARAMS)[0]
    assert answer.metrics.speculation.num_draft_tokens > 0


CONTRACT = {
    f"{module.__name__}.{name}": test
    for module in (test_contract, test_contract_state, test_contract_law)
    for name, test in vars(module).items()
    if name.startswith("test_") and {"target", "case"} <= inspect.signature(test).parameters.keys()
}


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize("test", CONTRACT.values(), ids=CONTRACT)
def test_the_documents_example_keeps_the_contract(made: Callable[..., Target], test: Callable[..., None]) -> None:
    """A lawful method of another package passes, and nobody had to be told of it."""
    parameters, case = inspect.signature(test).parameters, Case("cycle", "chain")
    if test is test_contract.test_a_shape_that_is_not_declared_is_refused:
        case = Case("cycle", "tree")
    target = made(llama)
    given = {"target": target, "case": case, "rule": "block"}
    if "drafter" in parameters:
        given["drafter"] = target.drafter(case)
    test(**{name: given[name] for name in parameters})


class Keeper(Stateless):
    """Another package's, with a state in an object of its own."""

    @dataclass
    class Seen:
        tokens: list[int] = field(default_factory=list)

    def __init__(self) -> None:
        self.seen: dict[int, Keeper.Seen] = {}


def test_what_another_packages_drafter_holds_is_seen() -> None:
    keeper = Keeper()
    assert held(keeper) == 0
    keeper.seen[3] = Keeper.Seen([1, 2])
    assert held(keeper) == 3


@pytest.mark.usefixtures("example")
def test_the_documents_python_runs(model: LoadedModel, monkeypatch: pytest.MonkeyPatch, capsys) -> None:  # type: ignore[no-untyped-def]
    """With the tiny model in the place of the one that it names."""
    monkeypatch.setattr("paceline.LLM", lambda name, *rest: LLM({"smollm2-135m": model}[name], *rest))
    exec(compile(USE, "add-a-drafter.md", "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.usefixtures("example")
def test_its_options_are_checked(model: LoadedModel) -> None:
    for values, message in (
        ({"cycle_length": 3}, "speculative_config has no key 'cycle_length'"),
        ({"cycle_period": 0}, "cycle_period is 0"),
        ({"prompt_lookup_max": 3}, "'cycle' does not take prompt_lookup_max"),
    ):
        with pytest.raises(PacelineError, match=message):
            create_drafter(SpeculativeConfig.from_dict({"method": "cycle", **values}), model)
    with pytest.raises(PacelineError, match="has no key 'cycle_period'"):
        SpeculativeConfig.from_dict({"method": "ngram", "cycle_period": 3})
    with pytest.raises(PacelineError, match="'ngram' does not take cycle_period"):
        create_drafter(SpeculativeConfig("ngram", method_options={"cycle_period": 3}), model)


def test_the_command_line_knows_it(site: Path, tiny_llama_dir: Path) -> None:
    install(site, "paceline-cycle", {"cycle": "paceline_cycle:METHOD"}, paceline_cycle=FILE)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\nfrom paceline.cli.main import main\n"
        f"sys.exit(main(['generate', '--model', {str(tiny_llama_dir)!r}, '--raw', '--method', 'cycle', '-n', '20',"
        " '--stats', 'a quick brown fox']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "method: cycle, K = 4" in result.stderr


def test_names_are_listed_without_importing_anything(site: Path) -> None:
    install(site, "paceline-bomb", {"bomb": "bomb:METHOD"}, bomb="raise SystemExit('imported')")
    assert registry.names() == (*registry.METHODS, "bomb")
    assert "bomb" not in sys.modules


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("import no_such_module", "method 'odd' of paceline-odd cannot be loaded: ModuleNotFoundError"),
        ("METHOD = 5", "cannot be loaded: odd:METHOD is 5"),
        ("OTHER = 5", "cannot be loaded: AttributeError"),
        (
            "from paceline.drafters.registry import Method\nMETHOD = Method('odd:create', '', shapes=('bush',))",
            "cannot be loaded: ValueError: shapes is",
        ),
    ],
)
def test_a_package_that_does_not_load_is_named(site: Path, module: str, message: str) -> None:
    install(site, "paceline-odd", {"odd": "odd:METHOD"}, odd=module)
    with pytest.raises(PacelineError, match=message) as error:
        registry.find("odd")
    assert "\n" not in str(error.value)


def test_a_name_that_is_taken_is_refused(site: Path) -> None:
    install(site, "paceline-rival", {"ngram": "rival:METHOD", "mine": "rival:METHOD"}, rival="")
    install(site, "paceline-other", {"mine": "other:METHOD"}, other="")
    with pytest.raises(PacelineError, match="'ngram' is taken twice: by Paceline itself and by paceline-rival"):
        registry.find("ngram")
    with pytest.raises(PacelineError, match="'mine' is taken twice: by paceline-other and by paceline-rival"):
        SpeculativeConfig.from_dict({"method": "mine"})
    assert registry.find("suffix") is registry.METHODS["suffix"]
    assert registry.names().count("ngram") == registry.names().count("mine") == 1
