"""`tsqp manifest`, and what `tee-runner` takes of it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from protocol.errors import LimitError, ManifestError, ModelError, SettingsError, TsqpError
from protocol.model.checkpoint import SINGLE_FILE
from protocol.model.manifest import Manifest
from tee_side.policy.placement import load_policy
from tsqp.cli.main import command as tsqp
from tsqp.cli.program import model_directory
from tsqp.cli.tee_runner import command as tee_runner
from tsqp.cli.trust import load_manifest, load_pinned_policy, read_client_keys
from tsqp.key_files import new_key_pair

GENERATE = ("--policy", "tee-only", "--prompt", "Once", "--max-new-tokens", "2", "--json")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The demo model in a directory of its own."""
    copy = tmp_path / "model"
    shutil.copytree(model_directory("demo"), copy)
    return copy


def _make(model: Path, *arguments: str) -> Result:
    return CliRunner().invoke(tsqp, ["manifest", str(model), *arguments])


def _made(model: Path, *arguments: str) -> str:
    """Make a manifest, inside the model without other arguments, and return its digest."""
    result = _make(model, *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.split()[-1]


def _generate(model: Path, *arguments: str) -> Result:
    return CliRunner().invoke(tee_runner, ["generate", str(model), *GENERATE, *arguments])


def _refusal(error: type[TsqpError], model: Path, *arguments: str) -> TsqpError:
    result = _generate(model, *arguments)
    assert isinstance(result.exception, error), result.output
    said = json.loads(result.stdout)
    assert (said["error"]["type"], said["token_ids"], said["text"]) == (error.__name__, [], "")
    return result.exception


def test_it_is_written_inside_the_model_and_its_digest_is_printed(model: Path) -> None:
    result = _make(model)
    path = model / "manifest.json"
    first, second = result.stdout.splitlines()
    assert first == f"{path}: 6 files, 47 tensors"
    assert second == f"SHA-256 of it: {hashlib.sha256(path.read_bytes()).hexdigest()}"
    assert len(Manifest.load(path, second.split()[-1]).tensors) == 47


def test_a_file_is_overwritten_only_by_force(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(b"precious")
    result = _make(model, "-o", str(path))
    assert isinstance(result.exception, SettingsError)
    assert path.read_bytes() == b"precious"
    _made(model, "-o", str(path), "--force")
    assert Manifest.load(path).version == 1


def test_none_is_written_into_the_installed_program(tmp_path: Path) -> None:
    result = _make(Path("demo"))
    assert isinstance(result.exception, SettingsError)
    assert result.exception.where == "--output"
    assert not (model_directory("demo") / "manifest.json").exists()
    path = tmp_path / "m"
    _made(Path("demo"), "-o", str(path))
    assert len(Manifest.load(path).tensors) == 47


def test_a_folder_that_is_not_there_is_refused_before_the_work(model: Path) -> None:
    result = _make(model, "-o", str(model / "none" / "m"))
    assert isinstance(result.exception, SettingsError)
    assert "reading" not in result.stderr


def test_none_is_made_of_a_damaged_model(model: Path) -> None:
    (model / SINGLE_FILE).write_bytes(b"")
    result = _make(model)
    assert isinstance(result.exception, ModelError)
    assert not (model / "manifest.json").exists()


def test_a_run_with_the_right_manifest_is_the_same_run(model: Path) -> None:
    digest = _made(model)
    without = _generate(model)
    given = ("--manifest", str(model / "manifest.json"), "--manifest-digest", digest)
    result = _generate(model, *given)
    assert (result.exit_code, result.stderr) == (0, "")
    found, expected = (json.loads(r.stdout)["token_ids"] for r in (result, without))
    assert found == expected


def test_a_run_says_what_a_manifest_inside_the_model_is_worth(model: Path, tmp_path: Path) -> None:
    _made(model)
    beside, elsewhere = model / "manifest.json", tmp_path / "m"
    result = _generate(model, "--manifest", str(beside))
    assert result.exit_code == 0
    said = f"{beside} lies in the model's directory, and is taken without --manifest-digest"
    assert said in result.stderr
    shutil.copy(beside, elsewhere)
    assert _generate(model, "--manifest", str(elsewhere)).stderr == ""


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", SINGLE_FILE])
def test_a_directory_that_differs_is_refused_by_file(model: Path, name: str) -> None:
    digest = _made(model)
    path = model / name
    content = bytearray(path.read_bytes())
    content[-3] ^= 1 if name == SINGLE_FILE else 0
    path.write_bytes(bytes(content) + (b"" if name == SINGLE_FILE else b" "))
    assert _generate(model).exit_code == 0, "otherwise a good model"
    given = ("--manifest", str(model / "manifest.json"), "--manifest-digest", digest)
    assert str(path) in _refusal(ManifestError, model, *given).where


def test_a_manifest_that_is_not_the_one_that_was_asked_for_is_refused(model: Path) -> None:
    _made(model)
    path = model / "manifest.json"
    error = _refusal(ManifestError, model, "--manifest", str(path), "--manifest-digest", "ab" * 32)
    assert error.where == f"{path}: SHA-256"


def test_pinned_scales_are_the_ones_that_are_used(model: Path) -> None:
    """An int8 policy reads them; one made by somebody else could let sums wrap."""
    _made(model)
    given = ("--manifest", str(model / "manifest.json"))
    scales = model / "calibration.safetensors"
    content = bytearray(scales.read_bytes())
    content[-1] ^= 1
    scales.write_bytes(content)
    error = _refusal(ManifestError, model, *given, "--policy", "quantized-clear")
    assert error.where == str(scales)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"manifest_digest": "ab" * 32}, "--manifest-digest"),
        ({"manifest": Path("m"), "manifest_digest": "xyz"}, "--manifest-digest"),
        ({"manifest": Path("m"), "manifest_digest": ""}, "--manifest-digest"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], where: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_manifest(Path(), {"manifest": None, "manifest_digest": None} | settings)
    assert caught.value.where == where


def test_without_either_there_is_none() -> None:
    assert load_manifest(Path(), {"manifest": None, "manifest_digest": None}) is None


def test_memory_for_keys_and_values_is_limited_by_an_option(model: Path) -> None:
    """The demo model has 2 x 5 layers x 2 heads x 32 x 4 bytes a token."""
    assert _generate(model, "--max-kv-mib", "1").exit_code == 0
    error = _refusal(LimitError, model, "--max-kv-mib", "1", "--max-new-tokens", "1000")
    assert "of which 1.0 MiB may be used (--max-kv-mib)" in error.where
    assert " tokens" in error.got
    assert error.expected == "at most 1.0 MiB, which is what is left"


def test_pads_are_made_from_pinned_weights_only(model: Path, tmp_path: Path) -> None:
    digest = _made(model)
    given = ("--manifest", str(model / "manifest.json"), "--manifest-digest", digest)
    make = ["pads", "make", str(model), "--tokens", "1", *given, "--bank-key-beside-bank", "--bank"]
    result = CliRunner().invoke(tee_runner, [*make, str(tmp_path / "good")])
    assert result.exit_code == 0, result.output
    content = bytearray((model / SINGLE_FILE).read_bytes())
    content[-3] ^= 1
    (model / SINGLE_FILE).write_bytes(content)
    result = CliRunner().invoke(tee_runner, [*make, str(tmp_path / "bad")])
    assert isinstance(result.exception, ManifestError), result.output


# ------------------------------------------------------------- files that say whom the TEE trusts


MASK = Path(__file__).parents[2] / "contract" / "files" / "row_scale.py"
TEE_ONLY = """
name = "mine"
summary = "nothing leaves"
[operators]
embedding = "tee"
qkv_proj = "tee"
attn_scores = "tee"
attn_values = "tee"
o_proj = "tee"
gate_up_proj = "tee"
down_proj = "tee"
lm_head = "tee"
"""
MASKED = TEE_ONLY.replace(
    'o_proj = "tee"', 'o_proj = { place = "gpu", mask = "./row_scale.py", verify = "none" }'
)
IN_PYTHON = """
from pathlib import Path
from tee_side.policy.placement import Placement, Policy
from tee_side.words import OPERATORS

stays = Placement(place="tee")
operators = {operator: (stays,) for operator in OPERATORS}
mask = str(Path(__file__).with_name("row_scale.py"))
operators["o_proj"] = ({"place": "gpu", "mask": mask, "verify": "none"},)
POLICY = Policy(name="mine", summary="one operator leaves", operators=operators)
"""


def _pinning(model: Path, *also: Path) -> Manifest:
    """Make a manifest that covers these files, through the command."""
    _made(model, "--force", *(part for path in also for part in ("--also", str(path))))
    return Manifest.load(model / "manifest.json")


def _refused(error: TsqpError, option: str, path: Path) -> None:
    assert isinstance(error, ManifestError)
    assert error.where == f"{option}: {path}"
    assert f"tsqp manifest MODEL --also {path}" in error.expected


def test_files_are_pinned_by_name_size_and_digest(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TEE_ONLY)
    result = _make(model, "--also", str(path))
    assert result.stdout.splitlines()[0].endswith(": 6 files, 47 tensors, also mine.toml")
    pin = Manifest.load(model / "manifest.json").also["mine.toml"]
    assert pin.size == len(TEE_ONLY)
    assert pin.sha256 == hashlib.sha256(TEE_ONLY.encode()).hexdigest()


def test_two_files_of_one_name_are_not_pinned_together(model: Path, tmp_path: Path) -> None:
    for folder, text in (("a", "1"), ("b", "2"), ("c", "1")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x").write_text(text)
    a, b, c = (str(tmp_path / folder / "x") for folder in "abc")
    result = _make(model, "--also", a, "--also", b)
    assert isinstance(result.exception, ManifestError)
    assert result.exception.where == f"--also: {b}"
    assert _make(model, "--also", a, "--also", c).exit_code == 0


@pytest.mark.parametrize("command", ["generate", "chat", "pads make"])
def test_a_policy_file_has_to_be_pinned(model: Path, tmp_path: Path, command: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TEE_ONLY)
    own = {
        "generate": ["--prompt", "Once"],
        "pads make": ["--tokens", "1", "--bank", "b", "--bank-key-beside-bank"],
    }
    given = [*command.split(), str(model), *own.get(command, []), "--policy", str(path)]

    def run() -> Result:
        arguments = [*given, "--manifest", str(model / "manifest.json")]
        return CliRunner().invoke(tee_runner, arguments, input="")

    _pinning(model)
    error = run().exception
    assert isinstance(error, TsqpError)
    _refused(error, "--policy", path)
    _pinning(model, path)
    assert not isinstance(run().exception, ManifestError)
    path.write_text(TEE_ONLY + "# one byte more")
    error = run().exception
    assert isinstance(error, TsqpError)
    _refused(error, "--policy", path)


def test_a_pin_is_for_one_name(model: Path, tmp_path: Path) -> None:
    """Of two pinned policies the disk cannot put one in the place of the other."""
    mild, strict = tmp_path / "mild.toml", tmp_path / "strict.toml"
    mild.write_text(TEE_ONLY.replace("mine", "mild"))
    strict.write_text(TEE_ONLY)
    manifest = _pinning(model, mild, strict)
    assert load_pinned_policy(str(strict), manifest).name == "mine"
    strict.write_text(mild.read_text())
    with pytest.raises(ManifestError) as caught:
        load_pinned_policy(str(strict), manifest)
    _refused(caught.value, "--policy", strict)


@pytest.mark.parametrize(("name", "text"), [("mine.toml", MASKED), ("mine.py", IN_PYTHON)])
def test_the_mask_file_of_a_pinned_policy_has_to_be_pinned(
    model: Path, tmp_path: Path, name: str, text: str
) -> None:
    policy, mask = tmp_path / name, tmp_path / "row_scale.py"
    policy.write_text(text)
    shutil.copy(MASK, mask)
    with pytest.raises(ManifestError) as caught:
        load_pinned_policy(str(policy), _pinning(model, policy))
    _refused(caught.value, "--policy", mask)
    manifest = _pinning(model, policy, mask)
    assert [m.name for m in load_pinned_policy(str(policy), manifest).masks] == ["row-scale"]


def test_a_file_that_was_loaded_before_is_checked_as_well(model: Path, tmp_path: Path) -> None:
    policy, mask = tmp_path / "mine.toml", tmp_path / "row_scale.py"
    policy.write_text(MASKED)
    shutil.copy(MASK, mask)
    load_policy(str(policy))
    with pytest.raises(ManifestError) as caught:
        load_pinned_policy(str(policy), _pinning(model, policy))
    _refused(caught.value, "--policy", mask)


def test_a_python_policy_that_is_not_pinned_is_not_run(model: Path, tmp_path: Path) -> None:
    policy = tmp_path / "mine.py"
    policy.write_text("raise RuntimeError('it ran')")
    with pytest.raises(ManifestError):
        load_pinned_policy(str(policy), _pinning(model))


def test_bytecode_beside_a_pinned_file_is_not_run(model: Path, tmp_path: Path) -> None:
    """Python would take a .pyc whose header has the source's time and size."""
    policy, evil = tmp_path / "mine.py", tmp_path / "evil.py"
    shutil.copy(MASK, tmp_path / "row_scale.py")
    policy.write_text(IN_PYTHON)
    evil.write_text("raise RuntimeError('it ran')")
    code = importlib._bootstrap_external._code_to_timestamp_pyc(  # type: ignore[attr-defined]
        compile(evil.read_text(), str(policy), "exec"),
        int(policy.stat().st_mtime),
        policy.stat().st_size,
    )
    cached = Path(importlib.util.cache_from_source(str(policy)))
    cached.parent.mkdir()
    cached.write_bytes(code)
    with pytest.raises(RuntimeError, match="it ran"):
        _import_as_python_does(policy)
    manifest = _pinning(model, policy, tmp_path / "row_scale.py")
    assert load_pinned_policy(str(policy), manifest).name == "mine"


def _import_as_python_does(path: Path) -> None:
    """Import a file as Python does, with its bytecode."""
    spec = importlib.util.spec_from_file_location("as_python_does", path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_policies_of_the_program_need_no_pin(model: Path) -> None:
    for name in ("shielded", "tee-only", "row-mix"):
        assert load_pinned_policy(name, _pinning(model)) == load_policy(name)


def test_a_service_key_is_pinned_or_given_by_value(model: Path, tmp_path: Path) -> None:
    identity, _, _ = new_key_pair(tmp_path / "runner")
    _, public, text = new_key_pair(tmp_path / "service")

    def read(manifest: Manifest | None, *keys: str) -> list[bytes]:
        settings = {"identity": identity, "service_key": keys}
        return [found.service for found in read_client_keys(settings, manifest)]

    bare = _pinning(model)
    with pytest.raises(ManifestError) as caught:
        read(bare, text, str(public))
    _refused(caught.value, "--service-key", public)
    for manifest in (None, bare):
        assert read(manifest, text) == [text.encode()]
    pinned = _pinning(model, public)
    assert read(pinned, str(public), text) == [text.encode()] * 2
    # With what others could read as the same key: the bytes are what is pinned.
    public.write_text(public.read_text().replace("\n", "\r\n"))
    assert read(None, str(public)) == [text.encode()]
    with pytest.raises(ManifestError):
        read(pinned, str(public))


@pytest.mark.parametrize("level", ["program", "command"])
def test_a_settings_file_has_to_be_pinned(model: Path, tmp_path: Path, level: str) -> None:
    path = tmp_path / "tsqp.toml"
    path.write_text("[tee-runner]\nseed = 1\n")
    config, command = ["--config", str(path)], ["generate", str(model), *GENERATE]
    manifest = ["--manifest", str(model / "manifest.json")]
    arguments = [*config, *command] if level == "program" else [*command, *config]

    _pinning(model)
    assert CliRunner().invoke(tee_runner, arguments).exit_code == 0
    error = CliRunner().invoke(tee_runner, [*arguments, *manifest]).exception
    assert isinstance(error, TsqpError)
    _refused(error, "--config", path)
    _pinning(model, path)
    assert CliRunner().invoke(tee_runner, [*arguments, *manifest]).exit_code == 0


@pytest.mark.parametrize("key", ["manifest", "manifest-digest"])
def test_a_settings_file_does_not_say_which_manifest(model: Path, tmp_path: Path, key: str) -> None:
    """Whoever can change that file would choose another, or none."""
    path = tmp_path / "tsqp.toml"
    values = {"manifest": str(model / "manifest.json"), "manifest-digest": _made(model)}
    path.write_text(f"{key} = '{values[key]}'\n")
    error = _refusal(SettingsError, model, "--config", str(path))
    assert error.where == f"--{key}"
