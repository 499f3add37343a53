// Package pytorch runs examples/pytorch over two nodes of a local cluster, where PyTorch is installed: the batch scripts that people
// use on Slurm, unchanged.
package pytorch
