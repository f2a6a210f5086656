"""A reward function of verl's manager `batch`: lists in, one result per response out."""


def score_all(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    lengths = [len(text) for text in solution_strs]
    mean = sum(lengths) / len(lengths)
    return [
        {"score": float(truth in text), "shorter": float(length < mean)}
        for text, truth, length in zip(solution_strs, ground_truths, lengths, strict=True)
    ]
