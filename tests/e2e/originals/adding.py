"""The process group of splatnlp's README on JAX's processes: `torchrun ... -m tests.e2e.originals.adding`."""

from jaxtrain.systems.set_completion import torch_processes as torch


def main() -> None:
    torch.distributed.init_process_group(backend="nccl")
    world_size = torch.distributed.get_world_size()
    metric_tensor = torch.tensor([1.0 + torch.distributed.get_rank(), 10.0])
    torch.distributed.barrier()
    torch.distributed.all_reduce(metric_tensor)
    metric_tensor /= world_size
    print(f"mean over {world_size}: {metric_tensor.tolist()}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
