"""Samplers: orders, weights, exact resume."""

import json
from collections import Counter

import pytest

from posttrain.config.trainer import DataConfig
from posttrain.data import DataError, PromptDataset, PromptSampler, make_sampler, register_sampler, sequential_batches
from posttrain.data.sampler import SAMPLERS


def batches(sampler, count):
    return [sampler.next_batch() for _ in range(count)]


def dataset(tokenizer, config, sizes, tmp_path=None, **columns):
    if tmp_path is None:
        rows = [{"prompt": str(i), **{name: values[i] for name, values in columns.items()}} for i in range(sizes[0])]
        return PromptDataset(rows, tokenizer, config)
    paths = []
    for number, size in enumerate(sizes):
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps([{"prompt": f"{number}:{i}"} for i in range(size)]))
    return PromptDataset(paths, tokenizer, config)


def test_every_epoch_is_its_own_permutation_without_the_rows_that_fill_no_batch():
    sampler = PromptSampler(10, 3, seed=5)
    assert sampler.batches_per_epoch == 3
    first, second = batches(sampler, 3), batches(sampler, 3)
    assert sampler.epoch == 1 and first != second
    for epoch in (first, second):
        rows = [row for batch in epoch for row in batch]
        assert len(rows) == len(set(rows)) == 9 and set(rows) <= set(range(10))


def test_the_last_rows_make_a_smaller_batch_when_they_are_kept():
    sampler = PromptSampler(10, 4, shuffle=False, drop_last=False)
    assert sampler.batches_per_epoch == 3
    assert batches(sampler, 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]


def test_the_order_depends_on_seed_and_epoch_alone():
    assert batches(PromptSampler(50, 7, seed=1), 20) == batches(PromptSampler(50, 7, seed=1), 20)
    assert batches(PromptSampler(50, 7, seed=1), 7) != batches(PromptSampler(50, 7, seed=2), 7)
    fives, tens = batches(PromptSampler(50, 5, seed=1), 20), batches(PromptSampler(50, 10, seed=1), 10)
    assert sum(fives, []) == sum(tens, [])  # noqa: RUF017


@pytest.mark.parametrize("drop_last", [True, False])
def test_resume_at_every_position_continues_exactly(drop_last):
    whole = batches(PromptSampler(11, 3, seed=7, drop_last=drop_last), 12)
    for done in range(12):
        first = PromptSampler(11, 3, seed=7, drop_last=drop_last)
        batches(first, done)
        state = json.loads(json.dumps(first.state_dict()))
        second = PromptSampler(11, 3, seed=7, drop_last=drop_last)
        second.load_state_dict(state)
        assert second.epoch == first.epoch and batches(second, 12 - done) == whole[done:]


def test_repeated_rows_make_the_next_batch_alone_also_after_a_resume():
    sampler = PromptSampler(10, 4, seed=1)
    plain = batches(PromptSampler(10, 4, seed=1), 3)
    assert sampler.next_batch() == plain[0] and not sampler.is_repeating
    sampler.repeat([7, 2, 5])
    resumed = PromptSampler(10, 4, seed=1)
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    for one in (sampler, resumed):
        assert one.next_batch() == [7, 2, 5, 7] and one.is_repeating
        assert batches(one, 2) == plain[1:] and not one.is_repeating


def test_resume_on_changed_data_or_seed_is_refused():
    state = PromptSampler(11, 3, seed=7).state_dict()
    for other in (
        PromptSampler(12, 3, seed=7),
        PromptSampler(11, 3, seed=8),
        PromptSampler(11, 3, seed=7, shuffle=False),
    ):
        with pytest.raises(DataError, match="cannot be continued where the checkpoint stood"):
            other.load_state_dict(state)


def test_a_batch_larger_than_the_data_is_an_error_with_both_numbers():
    with pytest.raises(ValueError, match="a batch of 5 rows cannot be drawn from an epoch of 4"):
        PromptSampler(4, 5)


def test_weights_draw_rows_of_a_file_more_often_and_keep_the_length_of_an_epoch(tokenizer, tmp_path):
    config = DataConfig(train_weights=[3.0, 1.0])
    data = dataset(tokenizer, config, (10, 30), tmp_path)  # expected draws per row: 2 and 2/3
    sampler = make_sampler(data, config, batch_size=40, seed=1)
    epochs = batches(sampler, 60)
    for epoch in epochs:
        counts = Counter(epoch)
        assert len(epoch) == 40 and all(counts[row] == 2 for row in range(10))
        assert sum(counts[row] for row in range(10, 40)) == 20 and max(counts[row] for row in range(10, 40)) == 1
    totals = Counter(row for epoch in epochs for row in epoch)
    assert all(25 <= totals[row] <= 55 for row in range(10, 40))  # 40 expected, not always the same rows
    assert epochs[0] != epochs[1] and epochs == batches(make_sampler(data, config, batch_size=40, seed=1), 60)


def test_equal_weights_draw_every_row_once_and_zero_leaves_a_file_out(tokenizer, tmp_path):
    config = DataConfig(train_weights=[2.0, 2.0, 2.0], shuffle=False)
    data = dataset(tokenizer, config, (3, 4, 7), tmp_path)
    assert make_sampler(data, config, batch_size=14, seed=1).next_batch() == list(range(14))
    config.train_weights = [0.0, 1.0, 1.0]
    drawn = make_sampler(data, config, batch_size=14, seed=1).next_batch()
    assert len(drawn) == 14 and min(drawn) == 3 and set(range(3, 14)) == set(drawn)


@pytest.mark.parametrize(
    ("weights", "message"),
    [([1.0], "1 weights for 2 files"), ([1.0, -1.0], "0 or more"), ([0.0, 0.0], "not all of them 0")],
)
def test_weights_that_do_not_fit_the_files_are_errors(tokenizer, tmp_path, weights, message):
    config = DataConfig(train_weights=weights)
    with pytest.raises(DataError, match=message):
        make_sampler(dataset(tokenizer, config, (2, 2), tmp_path), config, batch_size=2, seed=1)


def test_data_seed_wins_over_the_trainers(tokenizer):
    config = DataConfig(seed=3)
    data = dataset(tokenizer, config, (20,))
    one, two = (make_sampler(data, config, batch_size=20, seed=seed).next_batch() for seed in (1, 2))
    assert one == two == PromptSampler(20, 20, seed=3).next_batch()


def test_curriculum_gives_easy_rows_first_in_stable_order_every_epoch(tokenizer):
    config = DataConfig(sampler="curriculum", curriculum_key="level")
    data = dataset(tokenizer, config, (6,), level=[3, 1, 2, 1, 3.5, 0])
    sampler = make_sampler(data, config, batch_size=3, seed=1)
    assert batches(sampler, 4) == [[5, 1, 3], [2, 0, 4]] * 2


def test_curriculum_without_numbers_or_with_weights_is_an_error(tokenizer):
    config = DataConfig(sampler="curriculum")
    with pytest.raises(DataError, match=r"column 'difficulty' .*row 2 of the data has 'hard'"):
        make_sampler(dataset(tokenizer, config, (2,), difficulty=[1, "hard"]), config, batch_size=1, seed=1)
    config.train_weights = [1.0]
    with pytest.raises(DataError, match=r"no effect with data\.sampler=curriculum"):
        make_sampler(dataset(tokenizer, config, (1,), difficulty=[1]), config, batch_size=1, seed=1)


def test_own_samplers_are_found_by_name_and_unknown_ones_list_the_known(tokenizer):
    @register_sampler("backwards")
    def backwards(dataset, config, seed, epoch):
        return range(len(dataset) - 1, -1, -1)

    try:
        config = DataConfig(sampler="backwards")
        assert make_sampler(dataset(tokenizer, config, (4,)), config, batch_size=4, seed=1).next_batch() == [3, 2, 1, 0]
        with pytest.raises(ValueError, match="`backwards` is already registered by"):
            register_sampler("backwards")(lambda *_: [0])
    finally:
        del SAMPLERS["backwards"]
    with pytest.raises(DataError, match=r"data\.sampler is 'nope'; known are curriculum, default"):
        make_sampler(dataset(tokenizer, config, (4,)), DataConfig(sampler="nope"), batch_size=4, seed=1)


def test_orders_outside_the_data_or_of_changing_length_are_errors():
    with pytest.raises(DataError, match="row numbers from 0 to 3"):
        PromptSampler(4, 2, order=lambda epoch: [0, 4])
    sampler = PromptSampler(4, 2, order=lambda epoch: range(4 - epoch))
    batches(sampler, 2)
    with pytest.raises(DataError, match="3 rows in epoch 1, but 4"):
        sampler.next_batch()


def test_validation_goes_through_all_rows_in_order():
    assert list(sequential_batches(5, 2)) == [[0, 1], [2, 3], [4]]
    assert list(sequential_batches(3)) == [[0, 1, 2]]
