"""Rewards in a file without imports: reward workers load it by name, and would load torch with it from a test file."""


def even_share(data_source, solution_str, ground_truth, extra_info=None):
    """Has spread even for an untrained model: the share of characters with an even code."""
    return sum(ord(char) % 2 == 0 for char in solution_str) / max(1, len(solution_str))


def in_parts(data_source, solution_str, ground_truth, extra_info=None):
    """The same with two named parts."""
    share = even_share(data_source, solution_str, ground_truth)
    return {"score": share, "even": share, "short": 1.0 / (1 + len(solution_str))}


def rarely_right(data_source, solution_str, ground_truth, extra_info=None):
    """Right for few responses of an untrained model, so that many groups have no signal."""
    return float(solution_str[:1].isalnum())


def out_of_range(data_source, solution_str, ground_truth, extra_info=None):
    """Every third response gets a score that float32 cannot hold, or an integer without a text."""
    return [1e308, 10**5000, even_share(data_source, solution_str, ground_truth)][sum(map(ord, solution_str)) % 3]


def fingerprint(data_source, solution_str, ground_truth, extra_info=None):
    """Another number for every text, so that equal scores mean equal responses."""
    number = 1
    for char in solution_str:
        number = (number * 65599 + ord(char)) % 1000003
    return number / 1000003


def always_right(data_source, solution_str, ground_truth, extra_info=None):
    """Nothing to learn."""
    return 1.0
