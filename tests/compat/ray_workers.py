"""Workers of the tests, in a file that their processes import quickly."""

import os

from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import (
    Dispatch,
    Execute,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)


class Adder(Worker):
    def __init__(self, step):
        super().__init__()
        self.step = step

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def where(self, word):
        return f"{word}{self.rank}/{self.world_size}"

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, data):
        data.batch["x"] = data.batch["x"] + self.step * (self.rank + 1)
        data.meta_info["metrics"] = {"rows": len(data)}
        return data

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"), blocking=False)
    def add_later(self, data):
        return self.add(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def first(self):
        return os.environ["RANK"]

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def own(self, number):
        return number * 10

    def unmarked(self):
        return "here"


class Other(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def process(self):
        return os.getpid()


class Third(Other):
    pass
