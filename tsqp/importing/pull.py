"""Gets a model from a hub, by its own client: the files of a plain directory, compared and no code.

Which hub, which token: HF_ENDPOINT and HF_TOKEN of the client. Each file is compared with what the
hub says of the commit, by SHA-256 where it is a large one and as git names it where it is not.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from protocol.errors import ModelError, SettingsError, shown
from protocol.model.checkpoint import (
    INDEX_FILE,
    PICKLE_SUFFIXES,
    SINGLE_FILE,
    read_weight_map,
)
from tsqp.extras import needing
from tsqp.importing.sources import (
    BESIDE,
    TOKENIZERS,
    checked_config,
    new_directory,
    settings_of,
)

_FOLDER = ".cache"
RECORD_FILE = "pull.json"


def pull(
    name: str,
    directory: Path,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> str:
    """Get ORG/NAME or ORG/NAME@REVISION; return the commit.

    Files are in a folder of another name until all are there and right; a second run of the same
    commit takes what it finds there.
    Raises SettingsError for the directory or a hub that refuses, ModelError for what is no model or
    differs, OSError.
    """
    with needing("tsqp pull", "pip install 'tsqp[import]'"):
        from httpx2 import HTTPError
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
        from huggingface_hub.utils.tqdm import disable_progress_bars
    repository, _, revision = name.partition("@")
    disable_progress_bars()  # there is one display: ours
    api: Any = HfApi()
    where = f"{api.endpoint}/{shown(repository)}"
    draft = new_directory(directory).with_name(f".{directory.name}.pull")
    try:
        info = api.model_info(repository, revision=revision or None, files_metadata=True)
        files = {one.rfilename: one for one in info.siblings or ()}
        _begin(draft, {"repository": where, "commit": info.sha})

        def get(file: str) -> None:
            path, said = draft / file, files[file]
            if not _is(path, said):
                path.unlink(missing_ok=True)
                api.hf_hub_download(repository, file, revision=info.sha, local_dir=draft)
                right = _is(path, said)
                ModelError.unless(right, f"{where}: {shown(file)}", "other bytes", "the commit's")

        if INDEX_FILE in files and SINGLE_FILE not in files:
            get(INDEX_FILE)
        wanted = _wanted(files, draft, where)
        get("config.json")
        checked_config(settings_of(draft)[0], where)  # before what takes long
        total, done = sum(files[file].size or 0 for file in wanted), 0
        for file in wanted:
            get(file)
            done += files[file].size or 0
            progress(done, total)
    except (HfHubHTTPError, HFValidationError) as error:
        raise SettingsError(where, _said(error), "a model that this hub lets you read") from None
    except HTTPError as error:
        right = "a hub that answers: made again, this command goes on where it was"
        raise SettingsError(where, _said(error), right) from None
    shutil.rmtree(draft / _FOLDER, ignore_errors=True)  # of the client
    draft.rename(directory)
    return str(info.sha)


def _said(error: Exception) -> str:
    """Return what the client says in short."""
    return shown((str(error) or type(error).__name__).splitlines()[0])


def _begin(draft: Path, said: Mapping[str, str]) -> None:
    """Make the folder that grows; empty one of another commit."""
    record = draft / RECORD_FILE
    if not record.is_file() or record.read_text(encoding="utf-8") != json.dumps(said):
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        record.write_text(json.dumps(said), encoding="utf-8")


def _wanted(files: Mapping[str, Any], draft: Path, where: str) -> list[str]:
    """Return the files of a model's directory. Raises ModelError where there are no weights."""
    weights = [SINGLE_FILE] if SINGLE_FILE in files else []
    if (draft / INDEX_FILE).is_file():
        weights = [INDEX_FILE, *sorted(set(read_weight_map(draft / INDEX_FILE).values()))]
        absent = [name for name in weights if name not in files]
        ModelError.unless(not absent, f"{where}: {shown(str(absent[:1]))}", "no such file", "one")
    if not weights or "config.json" not in files:
        pickled = any(name.endswith(PICKLE_SUFFIXES) for name in files)
        got = "pickles, which can run code when they are loaded" if pickled else "no safetensors"
        raise ModelError(where, got, "config.json and safetensors")
    beside = [*BESIDE, *(() if "tokenizer.json" in files else TOKENIZERS)]
    return [name for name in ("config.json", *beside, *weights) if name in files]


def _is(path: Path, said: Any) -> bool:
    """Say whether a file is what a hub says of it."""
    if not path.is_file() or path.stat().st_size != said.size:
        return False
    with path.open("rb") as file:
        if said.lfs is not None:
            return bool(hashlib.file_digest(file, "sha256").hexdigest() == said.lfs.sha256)
        # As git names a file: with its kind and size in front.
        digest = hashlib.sha1(f"blob {said.size}\0".encode(), usedforsecurity=False)
        digest.update(file.read())
        return bool(digest.hexdigest() == said.blob_id)
