"""A reward file as a user would give it: it tells even an untrained model's responses apart."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(ord(char) % 2 == 0 for char in solution_str) / max(1, len(solution_str))
