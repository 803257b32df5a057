"""Copies between host and device; where they are one, nothing is copied."""

import torch

from shardhet.host_copy import HostCopy, to_device


def test_on_a_cpu_the_values_are_there_at_once_and_nothing_is_copied() -> None:
    tensor = torch.tensor([1.0, 2.0], requires_grad=True)
    copy = HostCopy(tensor * 2).read()
    assert copy.tolist() == [2.0, 4.0]
    assert not copy.requires_grad
    assert HostCopy(tensor).read().data_ptr() == tensor.data_ptr()
    assert to_device(tensor, torch.device("cpu")) is tensor
