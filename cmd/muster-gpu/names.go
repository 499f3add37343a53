package main

import (
	"fmt"
	"regexp"
	"strings"
)

// chip finds the part of a model's name that people call it by: letters and digits together, such as H100 or L40S.
var chip = regexp.MustCompile(`\b([a-z]{1,3}[0-9]{1,4}[a-z]{0,2})\b`)

// typeOf makes a type for requests from a model's name: "NVIDIA H100 80GB HBM3" is "h100", "NVIDIA A100-SXM4-80GB" is
// "a100"; names without such a part are kept whole, "NVIDIA TITAN V" is "titan_v".
func typeOf(model string) string {
	name := strings.ToLower(strings.TrimSpace(model))
	if found := chip.FindString(name); found != "" {
		return found
	}
	name = strings.TrimPrefix(name, "nvidia ")
	return strings.Join(strings.FieldsFunc(name, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9')
	}), "_")
}

// profileOf returns a MIG instance's profile: from its name if that has it ("NVIDIA H100 80GB HBM3 MIG 2g.20gb"),
// otherwise from its slices. The memory in a profile's name is the instance's share of the GPU in eighths, rounded
// up, of the GPU's whole gigabytes.
func profileOf(name string, gpuSlices, computeSlices uint32, memoryMB, gpuMemoryMB uint64) string {
	if _, profile, ok := strings.Cut(name, " MIG "); ok {
		return strings.ToLower(strings.TrimSpace(profile))
	}
	gb := uint64(0)
	if gpuMemoryMB > 0 {
		eighths := (memoryMB*8 + gpuMemoryMB - 1) / gpuMemoryMB
		wholeGB := (gpuMemoryMB + 1023) / 1024
		gb = (eighths*wholeGB + 4) / 8
	}
	profile := fmt.Sprintf("%dg.%dgb", gpuSlices, gb)
	if computeSlices < gpuSlices {
		profile = fmt.Sprintf("%dc.%s", computeSlices, profile)
	}
	return profile
}
