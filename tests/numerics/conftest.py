import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small tensors gain nothing from threads, and waiting for them is slow on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
