//go:build !cgo

package main

import nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"

// open says that this build knows nothing.
func open(options) (probe, *nodev1.GpuUnknown, error) {
	return nil, &nodev1.GpuUnknown{
		Code:     nodev1.GpuUnknownCode_GPU_UNKNOWN_CODE_NOT_BUILT,
		Sentence: "unknown: built without NVML; build muster-gpu where there is a C compiler (CGO_ENABLED=1)",
	}, nil
}
