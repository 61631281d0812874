"""`tsqp manifest`, and what `tee-runner` takes of it."""

import hashlib
import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from protocol.errors import ManifestError, ModelError, SettingsError, TsqpError
from protocol.model.at_rest import Manifest
from protocol.model.checkpoint import SINGLE_FILE
from tee_side.policy.placement import load_policy
from tee_side.words import OPERATORS
from tsqp.cli.main import command as tsqp
from tsqp.cli.tee_runner import command as tee_runner
from tsqp.key_files import new_key_pair
from tsqp.run.load import load_pinned_policy, read_client_keys
from tsqp.run.settings import RunSettings, model_directory

GENERATE = ("--policy", "tee-only", "--prompt", "Once", "--max-new-tokens", "2", "--json")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(model_directory("demo"), copy)
    return copy


def make(model: Path, *arguments: str) -> Result:
    return CliRunner().invoke(tsqp, ["manifest", str(model), *arguments])


def generate(model: Path, *arguments: str) -> Result:
    return CliRunner().invoke(tee_runner, ["generate", str(model), *GENERATE, *arguments])


def refusal(error: type[TsqpError], model: Path, *arguments: str) -> TsqpError:
    result = generate(model, *arguments)
    assert isinstance(result.exception, error), result.output
    said = json.loads(result.stdout)
    assert (said["error"]["type"], said["token_ids"], said["text"]) == (error.__name__, [], "")
    return result.exception


def change(path: Path) -> None:
    """Change one bit of a file of tensors, or add a blank to one of JSON."""
    content = bytearray(path.read_bytes())
    content[-3] ^= path.suffix == ".safetensors"
    path.write_bytes(bytes(content) + b" " * (path.suffix == ".json"))


def test_it_is_written_inside_the_model_and_nowhere_over_a_file(
    model: Path, tmp_path: Path
) -> None:
    result = make(model)
    path = model / "manifest.json"
    _, second = result.stdout.splitlines()
    assert second == f"SHA-256 of it: {hashlib.sha256(path.read_bytes()).hexdigest()}"
    assert len(Manifest.load(path, second.split()[-1]).tensors) == 47
    elsewhere = tmp_path / "m"
    elsewhere.write_bytes(b"precious")
    assert isinstance(make(model, "-o", str(elsewhere)).exception, SettingsError)
    assert elsewhere.read_bytes() == b"precious"
    make(model, "-o", str(elsewhere), "--force")
    assert Manifest.load(elsewhere).version == 1
    path.unlink()  # nor of a damaged model
    (model / SINGLE_FILE).write_bytes(b"")
    assert isinstance(make(model).exception, ModelError)
    assert not path.exists()


def test_what_differs_is_refused_by_file(model: Path, tmp_path: Path) -> None:
    digest = make(model).stdout.split()[-1]
    given = ["--manifest", str(model / "manifest.json"), "--manifest-digest", digest]
    assert generate(model, *given).stderr == ""
    # It says what a manifest inside the model is worth without its digest.
    said = f"{given[1]} lies in the model's directory, and is taken without --manifest-digest"
    assert said in generate(model, *given[:2]).stderr
    other = refusal(ManifestError, model, *given[:3], "ab" * 32)
    assert other.where == f"{given[1]}: SHA-256"
    pads = ["pads", "make", str(model), "--tokens", "1", "--bank-key-beside-bank", *given, "--bank"]
    assert CliRunner().invoke(tee_runner, [*pads, str(tmp_path / "good")]).exit_code == 0
    for name in ("config.json", "tokenizer.json", SINGLE_FILE):
        path = model / name
        before = path.read_bytes()
        change(path)
        error = refusal(ManifestError, model, *given, "--policy", "tee-only")
        assert str(path) in error.where
        if name == SINGLE_FILE:
            made = CliRunner().invoke(tee_runner, [*pads, str(tmp_path / "bad")])
            assert isinstance(made.exception, ManifestError)
        path.write_bytes(before)


MASK = Path(__file__).parents[2] / "contract" / "files" / "row_scale.py"
TEE_ONLY = 'name = "mine"\nsummary = "nothing leaves"\n[operators]\n' + "".join(
    f'{operator} = "tee"\n' for operator in OPERATORS
)
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


def pinning(model: Path, *also: Path) -> Manifest:
    """Make a manifest that covers these files, through the command."""
    result = make(model, "--force", *(part for path in also for part in ("--also", str(path))))
    assert result.exit_code == 0, result.output
    return Manifest.load(model / "manifest.json")


def not_pinned(error: BaseException | None, option: str, path: Path) -> None:
    assert isinstance(error, ManifestError)
    assert error.where == f"{option}: {path}"
    assert f"tsqp manifest MODEL --also {path}" in error.expected


def test_a_policy_file_has_to_be_pinned(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    options = ["--policy", str(path), "--manifest", str(model / "manifest.json")]
    for command, *own in (
        ("generate", "--prompt", "Once"),
        ("pads make", "--tokens", "1", "--bank", "b", "--bank-key-beside-bank"),
    ):
        given = [*command.split(), str(model), *own, *options]
        path.write_text(TEE_ONLY)
        pinning(model)
        not_pinned(CliRunner().invoke(tee_runner, given).exception, "--policy", path)
        pin, digest = pinning(model, path).also["mine.toml"], hashlib.sha256(TEE_ONLY.encode())
        assert (pin.size, pin.sha256) == (len(TEE_ONLY), digest.hexdigest())
        result = CliRunner().invoke(tee_runner, given)
        assert not isinstance(result.exception, ManifestError)
        path.write_text(TEE_ONLY + "# one byte more")
        not_pinned(CliRunner().invoke(tee_runner, given).exception, "--policy", path)


def test_a_pin_is_for_one_name(model: Path, tmp_path: Path) -> None:
    """Of two pinned policies the disk cannot put one in the place of the other."""
    mild, strict = tmp_path / "mild.toml", tmp_path / "strict.toml"
    mild.write_text(TEE_ONLY.replace("mine", "mild"))
    strict.write_text(TEE_ONLY)
    manifest = pinning(model, mild, strict)
    assert load_pinned_policy(str(strict), manifest).name == "mine"
    strict.write_text(mild.read_text())
    with pytest.raises(ManifestError) as caught:
        load_pinned_policy(str(strict), manifest)
    not_pinned(caught.value, "--policy", strict)
    # Two files of one name are not pinned together.
    (tmp_path / "other").mkdir()
    (tmp_path / "other/mild.toml").write_text(TEE_ONLY)
    result = make(
        model, "--force", "--also", str(mild), "--also", str(tmp_path / "other/mild.toml")
    )
    assert isinstance(result.exception, ManifestError)
    for name in ("shielded", "tee-only", "row-mix"):  # those of the program need no pin
        assert load_pinned_policy(name, manifest) == load_policy(name)


def test_neither_a_policy_nor_a_mask_without_a_pin_nor_bytecode_is_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor a mask. Python would take a .pyc whose header has the source's time and size."""
    mask, evil = tmp_path / "row_scale.py", tmp_path / "evil.py"
    evil.write_text("raise RuntimeError('it ran')")
    with pytest.raises(ManifestError):
        load_pinned_policy(str(evil), pinning(model))
    shutil.copy(MASK, mask)
    for name, text in (("mine.toml", MASKED), ("mine.py", IN_PYTHON)):
        policy = tmp_path / name
        policy.write_text(text)
        if name == "mine.toml":  # one that was loaded before is checked as well
            load_policy(str(policy))
        with pytest.raises(ManifestError) as caught:
            load_pinned_policy(str(policy), pinning(model, policy))
        not_pinned(caught.value, "--policy", mask)
        manifest = pinning(model, policy, mask)
        assert [m.name for m in load_pinned_policy(str(policy), manifest).masks] == ["row-scale"]
    code = importlib._bootstrap_external._code_to_timestamp_pyc(  # type: ignore[attr-defined]
        compile(evil.read_text(), str(policy), "exec"),
        int(policy.stat().st_mtime),
        policy.stat().st_size,
    )
    cached = Path(importlib.util.cache_from_source(str(policy)))
    cached.parent.mkdir()
    cached.write_bytes(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="it ran"):
        importlib.import_module("mine")
    assert load_pinned_policy(str(policy), manifest).name == "mine"


def test_a_service_key_is_pinned_or_given_by_value(model: Path, tmp_path: Path) -> None:
    identity, _, _ = new_key_pair(tmp_path / "runner")
    _, public, text = new_key_pair(tmp_path / "service")

    def read(manifest: Manifest | None, *keys: str) -> list[bytes]:
        settings = RunSettings(model="", identity=identity, service_key=keys)
        return [found.service for found in read_client_keys(settings, manifest)]

    bare = pinning(model)
    with pytest.raises(ManifestError) as caught:
        read(bare, text, str(public))
    not_pinned(caught.value, "--service-key", public)
    for manifest in (None, bare):
        assert read(manifest, text) == [text.encode()]
    with_key = pinning(model, public)
    assert read(with_key, str(public), text) == [text.encode()] * 2
    # With what others could read as the same key: the bytes are what is pinned.
    public.write_text(public.read_text().replace("\n", "\r\n"))
    assert read(None, str(public)) == [text.encode()]
    with pytest.raises(ManifestError):
        read(with_key, str(public))


def test_a_settings_file_has_to_be_pinned_and_does_not_say_which_manifest(
    model: Path, tmp_path: Path
) -> None:
    """Whoever can change that file would choose another, or none."""
    path = tmp_path / "tsqp.toml"
    path.write_text("[tee-runner]\nseed = 1\n")
    config, command = ["--config", str(path)], ["generate", str(model), *GENERATE]
    given = ["--manifest", str(model / "manifest.json")]
    for arguments in ([*config, *command], [*command, *config]):
        pinning(model)
        assert CliRunner().invoke(tee_runner, arguments).exit_code == 0
        error = CliRunner().invoke(tee_runner, [*arguments, *given]).exception
        not_pinned(error, "--config", path)
        pinning(model, path)
        assert CliRunner().invoke(tee_runner, [*arguments, *given]).exit_code == 0
    for key, value in (("manifest", given[1]), ("manifest-digest", "ab" * 32)):
        path.write_text(f"{key} = '{value}'\n")
        assert refusal(SettingsError, model, *config).where == f"--{key}"
