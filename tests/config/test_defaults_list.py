"""Defaults lists are followed as Hydra follows them: every tree here is composed by both."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf

from posttrain.config.defaults_list import ComposeError, ConfigFiles, DefaultsList, merge_trees, place_at
from posttrain.yaml_text import parse_yaml, read_yaml

FILES = {
    "db/mysql": "port: 3306\nuser: {name: a, roles: [x, y]}\n",
    "db/sqlite": "port: null\nfile: x.db\n",
    "db/nested": "defaults:\n  - mysql\n  - engine: inno\n  - _self_\nuser: {name: n}\n",
    "db/engine/inno": "threads: 4\n",
    "db/top": "# @package _global_\nseed: 5\n",
    "db/elsewhere": "# @package server.place\nport: 7\n",
    "db/absolute": "defaults:\n  - /server: apache\n  - _self_\nport: 8\n",
    "db/overriding": "defaults:\n  - override /server: nginx\nport: 9\n",
    "server/apache": "workers: 2\ndb: {port: 1}\n",
    "server/nginx": "workers: ???\nextra: 1\n",
    "server/db_mysql": "joined: true\n",
}
MAINS = {
    "a choice": "defaults:\n  - db: mysql\n  - _self_\nseed: 1\n",
    "own values first": "defaults:\n  - _self_\n  - db: mysql\ndb: {port: 1, user: {name: z}}\n",
    "own values last": "defaults:\n  - db: mysql\n  - _self_\ndb: {port: 1, user: {name: z}}\n",
    "a mapping replaced by null": "defaults:\n  - db: mysql\n  - _self_\ndb: {user: null}\n",
    "a list replaced": "defaults:\n  - db: mysql\n  - _self_\ndb: {user: {roles: [q]}}\n",
    "a package": "defaults:\n  - db@store.main: mysql\n  - db@store.other: sqlite\n  - _self_\n",
    "the root as package": "defaults:\n  - db@_global_: mysql\n  - _self_\n",
    "the own place as package": "defaults:\n  - db@_here_: mysql\n  - _self_\n",
    "a header": "defaults:\n  - db: top\n  - server: apache\n  - _self_\n",
    "a header with a path": "defaults:\n  - db: elsewhere\n  - _self_\n",
    "a header under a package": "defaults:\n  - db@x: elsewhere\n  - _self_\n",
    "lists in groups": "defaults:\n  - db: nested\n  - _self_\n",
    "lists in groups, placed": "defaults:\n  - db@a.b: nested\n  - _self_\n",
    "an absolute group": "defaults:\n  - db: absolute\n  - _self_\n",
    "several choices": "defaults:\n  - db: [mysql, sqlite]\n  - _self_\n",
    "optional": "defaults:\n  - optional db: nothere\n  - _self_\nseed: 1\n",
    "no choice": "defaults:\n  - db: null\n  - _self_\nseed: 1\n",
    "a file": "defaults:\n  - db/mysql\n  - server/apache@x\n  - _self_\n",
    "an override": "defaults:\n  - db: mysql\n  - _self_\n  - override db: sqlite\n",
    "an override from a group": "defaults:\n  - server: apache\n  - db: overriding\n  - _self_\n",
    "a missing value": "defaults:\n  - server: apache\n  - server@x: nginx\n  - _self_\nserver:\n  workers: ???\n",
    "a choice by others": "defaults:\n  - db: mysql\n  - server: db_${db}\n  - _self_\n",
    "no list": "seed: 3\n",
    "a file that is missing": "defaults:\n  - nothere\n",
    "a choice that is missing": "defaults:\n  - db: nothere\n",
    "an override of nothing": "defaults:\n  - db: mysql\n  - _self_\n  - override server: apache\n",
    "an override in the middle": "defaults:\n  - db: mysql\n  - override db: sqlite\n  - server: apache\n  - _self_\n",
    "own values twice": "defaults:\n  - _self_\n  - db: mysql\n  - _self_\n",
    "a choice twice": "defaults:\n  - db: mysql\n  - db: mysql\n  - _self_\n",
    "two choices": "defaults:\n  - db: mysql\n  - db: sqlite\n  - _self_\n",
    "a choice to be made": "defaults:\n  - db: ???\n  - _self_\n",
    "a number": "defaults:\n  - db: 3\n",
    "a mapping": "defaults: {db: mysql}\n",
    "two keys": "defaults:\n  - db: mysql\n    server: apache\n",
    "an unknown reference": "defaults:\n  - db: mysql\n  - server: db_${nothere}\n  - _self_\n",
}
CHOICES = {
    "db=sqlite": "a choice",
    "+server=apache": "a choice",
    "+server=nothere": "a choice",
    "+server@x.y=apache": "a choice",
    "+db=sqlite": "a choice",
    "server=apache": "a choice",
    "db=mysql": "a package",
    "db@store.main=sqlite": "a package",
    "db=nested": "several choices",
    "+db=mysql": "no list",
}
CASES = [(name, ()) for name in MAINS] + [(main, (choice,)) for choice, main in CHOICES.items()]


def hydras(folder: Path, choices: tuple[str, ...]) -> Any:
    with initialize_config_dir(config_dir=str(folder), version_base=None):
        try:
            tree = OmegaConf.to_container(hydra_compose("main", overrides=list(choices)), resolve=False)
        except (HydraException, ValueError) as error:
            return f"refused: {str(error).partition('Config search path')[0].strip()}"
    return tree


def ours(folder: Path, choices: tuple[str, ...]) -> Any:
    files, tree = ConfigFiles([folder]), dict[str, Any]()
    try:
        defaults = DefaultsList(files)
        for choice in choices:
            defaults.choose(choice)
        for place in defaults.places("main"):
            loaded = files.read(place.path)
            assert loaded is not None
            merge_trees(tree, place_at(loaded.values, place.package))
    except ComposeError as error:
        return f"refused: {str(error).partition('Config search path')[0].strip()}"
    return tree


@pytest.mark.parametrize(("main", "choices"), CASES, ids=str)
def test_a_tree_is_composed_as_hydra_composes_it(tmp_path, main, choices):
    for name, text in {**FILES, "main": MAINS[main]}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert ours(tmp_path, choices) == hydras(tmp_path, choices)


def test_a_file_in_its_own_list_is_named(tmp_path):
    (tmp_path / "main.yaml").write_text("defaults:\n  - main\n")
    assert ours(tmp_path, ()) == "refused: main -> main: a file cannot be in its own defaults list"


def test_of_two_files_the_one_in_the_first_folder_counts(tmp_path):
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "main.yaml").write_text(f"name: {folder}\n")
    found = ConfigFiles([tmp_path / "first", tmp_path / "second"]).read("main")
    assert found is not None and found.values == {"name": "first"}


TEXTS = [
    "1e-6",
    "1_000",
    "0x10",
    ".5",
    "2020-01-01",
    "12:30:45",
    "[a, 1e3]",
    "{a: .inf}",
    "yes",
    "~",
    "'1'",
    "a: b",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_values_are_read_as_omegaconf_reads_them(tmp_path, text):
    (tmp_path / "x.yaml").write_text(f"key: {text}\n" if ": " not in text or text.startswith("{") else text)
    assert read_yaml(tmp_path / "x.yaml") == OmegaConf.to_container(OmegaConf.load(tmp_path / "x.yaml"))


def test_the_message_of_a_broken_text_is_that_of_the_parser_in_python(tmp_path):
    with pytest.raises(ValueError, match=r"expected ',' or ']', but got '<stream end>'"):
        parse_yaml("[1, 2")
    with pytest.raises(ValueError, match="found duplicate key a"):
        parse_yaml("{a: 1, a: 2}")
