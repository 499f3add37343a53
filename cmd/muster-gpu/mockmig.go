//go:build cgo

package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/server"
)

// instances are the pretended MIG instances of one GPU for a list of profiles.
type instances struct {
	profiles []string
	devices  []nvml.Device
}

// furnishMIG makes the instances that the faults ask for, out of the mock server's profiles.
func (p *pretended) furnishMIG(i int, d *server.Device, seed string) {
	current := func() []nvml.Device {
		wanted := p.faults.of(i).Mig
		have := p.instances[i]
		if have == nil || !slices.Equal(have.profiles, wanted) {
			have = &instances{profiles: wanted}
			for n, profile := range wanted {
				if m := migDevice(d, n, profile, uuid("MIG", d.Config.Name, seed, i, n, profile)); m != nil {
					have.devices = append(have.devices, m)
				}
			}
			p.instances[i] = have
		}
		return have.devices
	}
	d.GetMigModeFunc = func() (int, int, nvml.Return) {
		if len(p.faults.of(i).Mig) > 0 {
			return nvml.DEVICE_MIG_ENABLE, nvml.DEVICE_MIG_ENABLE, nvml.SUCCESS
		}
		return nvml.DEVICE_MIG_DISABLE, nvml.DEVICE_MIG_DISABLE, nvml.SUCCESS
	}
	d.GetMaxMigDeviceCountFunc = func() (int, nvml.Return) { return 7, nvml.SUCCESS }
	d.GetMigDeviceHandleByIndexFunc = func(n int) (nvml.Device, nvml.Return) {
		if all := current(); n < len(all) {
			return all[n], nvml.SUCCESS
		}
		return nil, nvml.ERROR_NOT_FOUND
	}
}

// migDevice makes an instance of a profile such as "2g.20gb"; nil if the GPU has no such profile.
func migDevice(d *server.Device, n int, profile, id string) nvml.Device {
	for _, info := range d.Config.MIGProfiles.GpuInstanceProfiles {
		gb := profileOf("", info.SliceCount, info.SliceCount, info.MemorySizeMB, d.Config.MemoryMB)
		if gb != strings.TrimSuffix(profile, "+me") {
			continue
		}
		return &mock.Device{
			GetUUIDFunc:              func() (string, nvml.Return) { return id, nvml.SUCCESS },
			GetNameFunc:              func() (string, nvml.Return) { return fmt.Sprintf("%s MIG %s", d.Config.Name, profile), nvml.SUCCESS },
			GetGpuInstanceIdFunc:     func() (int, nvml.Return) { return n + 1, nvml.SUCCESS },
			GetComputeInstanceIdFunc: func() (int, nvml.Return) { return 0, nvml.SUCCESS },
			GetAttributesFunc: func() (nvml.DeviceAttributes, nvml.Return) {
				return nvml.DeviceAttributes{
					GpuInstanceSliceCount: info.SliceCount, ComputeInstanceSliceCount: info.SliceCount, MemorySizeMB: info.MemorySizeMB,
				}, nvml.SUCCESS
			},
		}
	}
	return nil
}
