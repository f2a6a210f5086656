"""Helpers that verl's own tests import: each does on a small case what verl's does."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys

import pytest
import torch
from tensordict import TensorDict

from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
from verl.utils import fs, import_utils, net_utils, ray_utils
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode, SFTTensorCollator
from verl.utils.fs import copy_to_local, verify_copy
from verl.utils.logger import LocalLogger, log_with_rank, print_rank_0, print_with_rank
from verl.utils.seqlen_balancing import balanced_chunk_range, greedy_partition
from verl.utils.torch_functional import distributed_mean_max_min_std, expand_as_nested
from verl.utils.transformers_compat import is_transformers_version_in_range
from verl.workers.config import ActorConfig, FSDPOptimizerConfig, McoreOptimizerConfig, OptimizerConfig, build_optimizer
from verl.workers.utils.padding import (
    build_attention_mask_from_nested,
    left_right_2_no_padding,
    no_padding_2_padding,
    response_from_nested,
    response_to_nested,
)


def nested(*rows: list[float]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


# -- settings ---------------------------------------------------------------------------------------------------------


def test_an_optimizers_settings_have_verls_defaults_and_checks():
    made = FSDPOptimizerConfig(lr=0.1)
    assert (made.min_lr_ratio, made.lr_scheduler_type, made.num_cycles, made.betas) == (
        None,
        "constant",
        0.5,
        (0.9, 0.999),
    )
    with pytest.warns(DeprecationWarning, match="warmup_style"):
        assert FSDPOptimizerConfig(lr=0.1, warmup_style="cosine").lr_scheduler_type == "cosine"
    with pytest.warns(DeprecationWarning, match="grad_clip"):
        assert OptimizerConfig(lr=0.1, grad_clip=0.5).clip_grad == 0.5
    with pytest.raises(AssertionError, match="constant, cosine"):
        FSDPOptimizerConfig(lr=0.1, lr_scheduler_type="steps")
    with pytest.raises(AssertionError, match="exp_avg_dtype"):
        McoreOptimizerConfig(lr=0.1, exp_avg_dtype="fp8")


def test_an_optimizer_is_built_from_its_settings():
    weights = [torch.nn.Parameter(torch.zeros(2))]
    adam = build_optimizer(weights, FSDPOptimizerConfig(lr=0.1, betas=(0.5, 0.6), weight_decay=0.2))
    group = adam.param_groups[0]
    assert type(adam) is torch.optim.AdamW and (group["lr"], group["betas"], group["weight_decay"]) == (
        0.1,
        (0.5, 0.6),
        0.2,
    )
    sgd = FSDPOptimizerConfig(lr=0.1, optimizer="SGD", override_optimizer_config={"momentum": 0.9})
    assert build_optimizer(weights, sgd).param_groups[0]["momentum"] == 0.9
    with pytest.raises(AttributeError, match="'Nothing' not found"):
        build_optimizer(weights, FSDPOptimizerConfig(lr=0.1, optimizer="Nothing"))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"loss_agg_mode": "odd", "use_dynamic_bsz": True}, "Invalid loss_agg_mode"),
        ({"ppo_micro_batch_size": 4, "ppo_micro_batch_size_per_gpu": 2}, "You have set both"),
        ({}, "Please set at least one"),
    ],
)
def test_an_actor_is_rejected_as_verl_rejects_it(more, says):
    with pytest.raises((ValueError, AssertionError), match=says):
        ActorConfig(strategy="fsdp", rollout_n=1, **more)


def test_an_actors_sizes_are_compared_with_the_run():
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_mini_batch_size=256, ppo_micro_batch_size=8)
    config.validate(n_gpus=8, train_batch_size=256)
    with pytest.raises(ValueError, match="train_batch_size"):
        config.validate(n_gpus=8, train_batch_size=128)
    with pytest.raises(ValueError, match="must be >= n_gpus"):
        config.validate(n_gpus=16, train_batch_size=512)
    split = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, ulysses_sequence_parallel_size=2)
    with pytest.raises(ValueError, match="you must enable `use_remove_padding`"):
        split.validate(n_gpus=8, train_batch_size=256, model_config={"use_remove_padding": False})


# -- tensors ----------------------------------------------------------------------------------------------------------


def test_statistics_over_ranks_are_those_of_the_tensor_in_one_process():
    values = torch.tensor([1.0, 2.0, 4.0])
    mean, largest, smallest, spread = distributed_mean_max_min_std(values)
    assert (mean, largest, smallest) == (values.mean(), 4.0, 1.0)
    assert torch.allclose(spread, values.std())
    assert distributed_mean_max_min_std(values, False, False, False)[1:] == (None, None, None)


def test_a_value_per_row_is_repeated_for_its_tokens():
    tokens = nested([0.0, 0.0], [0.0], [0.0, 0.0, 0.0])
    assert expand_as_nested(torch.tensor([7, 8, 9]), tokens).values().tolist() == [7, 7, 8, 9, 9, 9]
    for wrong in (torch.tensor([7, 8]), torch.tensor([[7, 8, 9]])):
        with pytest.raises(AssertionError):
            expand_as_nested(wrong, tokens)


def padded() -> TensorDict:
    """Two rows: prompts of 1 and 2 tokens, responses of 2 and 1."""
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
    return TensorDict(
        {
            "input_ids": torch.tensor([[0, 5, 6, 7], [1, 2, 3, 0]]),
            "attention_mask": mask,
            "position_ids": torch.tensor([[0, 0, 1, 2], [0, 1, 2, 2]]),
            "response_mask": torch.tensor([[1, 1], [1, 0]]),
            "prompts": nested([5.0], [1.0, 2.0]),
            "responses": nested([6.0, 7.0], [3.0]),
        },
        batch_size=2,
    )


def test_a_padded_batch_loses_its_padding():
    made = left_right_2_no_padding(padded())
    assert made["input_ids"].values().tolist() == [5, 6, 7, 1, 2, 3]
    assert made["position_ids"].values().tolist() == [0, 1, 2, 0, 1, 2]
    assert tu.get_non_tensor_data(made, "max_seq_len", 0) == 4
    assert tu.get_non_tensor_data(made, "max_response_len", 0) == 2
    assert made["loss_mask"].tolist() == [[1, 1], [1, 0]]
    with pytest.raises(AssertionError, match="position_ids is required"):
        left_right_2_no_padding(padded().exclude("position_ids"))


def test_what_a_model_gives_is_cut_to_responses_one_place_earlier():
    outputs = nested([10.0, 11.0, 12.0], [20.0, 21.0, 22.0])
    expected = [[10.0, 11.0], [21.0, 0.0]]
    assert no_padding_2_padding(outputs, padded()).tolist() == expected
    assert no_padding_2_padding(outputs.values(), padded()).tolist() == expected
    mask = nested([1.0, 1.0], [1.0])
    assert response_from_nested(outputs, mask).values().tolist() == [10.0, 11.0, 21.0]
    assert response_to_nested(torch.tensor(expected), mask).values().tolist() == [10.0, 11.0, 21.0]
    assert build_attention_mask_from_nested(mask, 3).tolist() == [[1, 1, 0], [1, 0, 0]]


def test_rows_of_supervised_data_become_nested_or_stacked():
    rows = [{"ids": torch.tensor([1, 2]), "who": "a"}, {"ids": torch.tensor([3]), "who": "b"}]
    made = SFTTensorCollator(DatasetPadMode.NO_PADDING)(rows)
    assert made["ids"].values().tolist() == [1, 2, 3] and made["who"].tolist() == ["a", "b"]
    stacked = SFTTensorCollator(DatasetPadMode.RIGHT)([{"ids": torch.tensor([1])}, {"ids": torch.tensor([2])}])
    assert stacked["ids"].tolist() == [[1], [2]]


def test_rows_are_dealt_to_the_part_with_the_fewest_tokens():
    assert greedy_partition([5, 1, 1, 1], 2, equal_size=False) == [[0], [1, 2, 3]]
    assert greedy_partition([5, 1, 1, 1], 2, equal_size=True) == [[0, 3], [1, 2]]
    with pytest.raises(AssertionError, match="equal size"):
        greedy_partition([5, 1, 1], 2, equal_size=True)


# -- files, addresses, messages ---------------------------------------------------------------------------------------


def test_a_copy_is_verified_by_names_and_sizes(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder / "sub").mkdir(parents=True)
        (tmp_path / folder / "sub" / "file").write_text("text")
    one, other = str(tmp_path / "a"), str(tmp_path / "b")
    assert verify_copy(one, other) and verify_copy(f"{one}/sub/file", f"{other}/sub/file")
    (tmp_path / "b" / "sub" / "file").write_text("longer text")
    assert not verify_copy(one, other) and not verify_copy(one, f"{other}/nothing")
    assert copy_to_local(None) is None and copy_to_local("") is None and copy_to_local(one) == one


def test_a_folder_is_compared_with_its_record(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_text("text")
    record = fs._record_directory_structure(str(tmp_path))
    assert fs._check_directory_structure(str(tmp_path), record)
    (tmp_path / "new").write_text("text")
    assert not fs._check_directory_structure(str(tmp_path), record)
    assert not fs._check_directory_structure(str(tmp_path), str(tmp_path / "none"))


def test_a_module_is_loaded_from_a_file_with_verls_errors(tmp_path):
    for name, text in {
        "good": "import sys\nme = sys.modules.get(__name__)\n",
        "bad": "raise ValueError('broken')",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    module = import_utils.load_module(str(tmp_path / "good.py"), module_name="verl_test_loaded")
    assert module.me is module is sys.modules.pop("verl_test_loaded")
    with pytest.raises(RuntimeError, match="already exists"):
        import_utils.load_module(str(tmp_path / "good.py"), module_name="sys")
    for module_name in (None, "verl_test_broken"):
        with pytest.raises(RuntimeError, match="Error loading module"):
            import_utils.load_module(str(tmp_path / "bad.py"), module_name=module_name)
    assert "verl_test_broken" not in sys.modules
    with pytest.raises(FileNotFoundError):
        import_utils.load_extern_object(str(tmp_path / "none.py"), "Name")
    with pytest.raises(AttributeError):
        import_utils.load_extern_object(None, "Name")


def test_a_setting_that_is_not_there_is_both_errors():
    for error in (KeyError, AttributeError):
        with pytest.raises(error):
            ActorConfig()["nothing"]
    assert ActorConfig().get("nothing", 3) == 3


def test_chunks_share_items_in_order():
    assert [balanced_chunk_range(9, 4, part) for part in range(4)] == [(0, 3), (3, 5), (5, 7), (7, 9)]
    assert [balanced_chunk_range(2, 4, part) for part in range(4)] == [(0, 1), (1, 2), (2, 2), (2, 2)]
    with pytest.raises(ValueError, match="no chunk 4 of 4"):
        balanced_chunk_range(9, 4, 4)


def test_addresses_and_a_port_that_is_held():
    assert net_utils.is_ipv4("127.0.0.1") and not net_utils.is_ipv4("::1") and net_utils.is_ipv6("::1")
    assert not net_utils.is_valid_ipv6_address("localhost")
    port, held = net_utils.get_free_port("127.0.0.1", seed=3)
    with held, socket.socket() as second, pytest.raises(OSError):
        second.bind(("127.0.0.1", port))


def test_messages_carry_their_rank(capsys, caplog):
    LocalLogger().log({"loss": 0.5, "name": "x"}, step=3)
    LocalLogger(print_to_console=False).log({"loss": 1}, step=4)
    print_rank_0("hello")
    print_with_rank("here", rank=2)
    print_with_rank("not here", rank=2, log_only_rank_0=True)
    assert capsys.readouterr().out == "step:3 - loss:0.5\nhello\n[Rank 2] here\n"
    with caplog.at_level(logging.INFO):
        log_with_rank("kept", 1, logging.getLogger("x"))
    assert caplog.messages == ["[Rank 1] kept"]


def test_installed_packages_and_versions():
    assert import_utils.is_megatron_core_available() in (True, False)
    assert is_transformers_version_in_range("4.0.0") and not is_transformers_version_in_range(max_version="4.0.0")


# -- coroutines -------------------------------------------------------------------------------------------------------


async def double(value: int) -> int:
    await asyncio.sleep(0)
    return 2 * value


def test_a_coroutine_function_is_called_by_plain_code_and_awaited_by_coroutines():
    called = ray_utils.auto_await(double)
    assert called(2) == 4 and ray_utils.run_coroutine_sync(double(3)) == 6 and ray_utils.run_coroutine_sync(5) == 5

    def plain() -> int:
        return called(7)

    async def both() -> tuple[int, int]:
        return await called(4), plain()

    assert asyncio.run(both()) == (8, 14)
    assert ray_utils.ray_noset_visible_devices({"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"})
    assert not ray_utils.ray_noset_visible_devices({})


def test_gdpo_needs_a_score_beside_its_rewards():
    from types import SimpleNamespace

    manager = get_reward_manager_cls("gdpo")

    class Row:
        batch = {"responses": torch.tensor([1, 2]), "attention_mask": torch.tensor([1, 1])}  # noqa: RUF012
        non_tensor_batch = {"data_source": "x", "reward_model": {"ground_truth": "2"}}  # noqa: RUF012

    tokenizer = SimpleNamespace(decode=lambda ids, **_: "2")
    for result in ({"score": 1.0, "format_reward": 0.5}, {"format_reward": 0.5}):
        made = manager(None, tokenizer, lambda result=result, **_: result)
        if "score" in result:
            told = asyncio.run(made.run_single([Row()]))
            assert told == {"reward_score": 1.0, "reward_extra_info": result}
        else:
            with pytest.raises(KeyError, match="scalar 'score'"):
                asyncio.run(made.run_single([Row()]))
