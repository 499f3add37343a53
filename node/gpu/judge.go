package gpu

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

const (
	// slowedHolds is how long heat and slowed clocks count after they were last seen: they come and go with the load.
	slowedHolds = 5 * time.Minute
	// maxRemembered bounds the errors that are remembered; each GPU has few different ones.
	maxRemembered = 256
)

// Facts are what findings are made of.
type Facts struct {
	// Inventory is the last one that was read, merged; nil if none ever was.
	Inventory *nodev1.GpuInventory
	// Health is the last reading; nil if none ever was.
	Health *nodev1.GpuHealth
	// Unknown says why the newest answer is not known; nil if it is.
	Unknown *nodev1.GpuUnknown
	// UnknownSince is since when.
	UnknownSince time.Time
	// PCIGPUs is how many GPUs the bus has when the driver could not be asked; nil if that is not known either.
	PCIGPUs *uint32
	// Xids are the errors that came.
	Xids []*nodev1.GpuRemembered
}

// Judge returns what the facts mean, without Since: by device, worst first. It is pure.
func Judge(f Facts, now time.Time) []Finding {
	j := judge{facts: f, now: now}
	j.whole()
	for _, d := range f.Inventory.GetDevices() {
		if d.Mig == nil {
			j.device(d)
		}
	}
	for _, r := range f.Health.GetGpus() {
		if d := j.deviceOf(r); d != nil && !d.Lost {
			j.reading(d, r)
		}
	}
	for _, x := range f.Xids {
		j.xid(x)
	}
	j.sort()
	return j.findings
}

type judge struct {
	facts    Facts
	now      time.Time
	findings []Finding
}

func (j *judge) sort() {
	slices.SortStableFunc(j.findings, func(a, b Finding) int {
		if c := int(b.Severity) - int(a.Severity); c != 0 {
			return c
		}
		if c := slices.Compare(a.Devices, b.Devices); c != 0 {
			return c
		}
		return strings.Compare(a.UUID+a.Code, b.UUID+b.Code)
	})
}

// on adds a finding on a GPU. One of which nothing can be allocated (it was never identified, or has no MIG instance) keeps no work
// away, and must not be taken for the whole node.
func (j *judge) on(d *nodev1.GpuDevice, f Finding) {
	f.UUID, f.Devices = d.Uuid, Numbers(j.facts.Inventory, d.Uuid)
	if len(f.Devices) == 0 {
		f.Severity, f.EndsWork = SeverityInfo, false
	}
	name := fmt.Sprintf("GPU %d", d.Index)
	if d.PciAddress != "" {
		name += " at " + d.PciAddress
	}
	f.Reason = name + ": " + f.Reason
	j.findings = append(j.findings, f)
}

// deviceOf finds the GPU of a reading: by its id, or if that could not be read by its index.
func (j *judge) deviceOf(r *nodev1.GpuReading) *nodev1.GpuDevice {
	for _, d := range j.facts.Inventory.GetDevices() {
		if d.Mig == nil && (r.Uuid != "" && d.Uuid == r.Uuid || r.Uuid == "" && d.Index == r.Index && !d.Missing) {
			return d
		}
	}
	return nil
}

// whole judges the probe and the driver.
func (j *judge) whole() {
	f, inv := j.facts, j.facts.Inventory
	if f.Unknown == nil {
		listed := uint32(0)
		for _, d := range inv.GetDevices() {
			if d.Mig == nil && !d.Missing {
				listed++
			}
		}
		if inv != nil && inv.PciGpus != nil && inv.GetPciGpus() > listed {
			j.findings = append(j.findings, Finding{
				Verdict: OK, Severity: SeverityInfo, Owner: OwnerSite, Code: CodeUnlisted,
				Reason: fmt.Sprintf("the machine has %d GPUs on its PCI bus, and the driver lists %d", inv.GetPciGpus(), listed),
				Clears: "look in the kernel's log why the driver leaves GPUs out; one that is passed to a virtual machine is normal",
			})
		}
		return
	}
	u := Finding{
		Verdict: Unknown, Severity: SeverityDegraded, Owner: OwnerHardware, Code: CodeProbeUnknown,
		Reason: f.Unknown.Sentence, Clears: clearsWithNextProbe, Since: f.UnknownSince,
	}
	switch f.Unknown.Code {
	case nodev1.GpuUnknownCode_GPU_UNKNOWN_CODE_TIMEOUT:
		u.Code = CodeProbeTimeout
	case nodev1.GpuUnknownCode_GPU_UNKNOWN_CODE_STUCK:
		u.Code, u.Clears = CodeProbeStuck, "the stuck probes end, usually only by a reboot of the node"
	case nodev1.GpuUnknownCode_GPU_UNKNOWN_CODE_NOT_BUILT, nodev1.GpuUnknownCode_GPU_UNKNOWN_CODE_NO_LIBRARY,
		nodev1.GpuUnknownCode_GPU_UNKNOWN_CODE_NO_DRIVER, nodev1.GpuUnknownCode_GPU_UNKNOWN_CODE_VERSION_MISMATCH,
		nodev1.GpuUnknownCode_GPU_UNKNOWN_CODE_NO_PERMISSION:
		u.Code, u.Owner = CodeDriverUnknown, OwnerSite
		if len(inv.GetDevices()) == 0 {
			u.Severity = SeverityInfo
		}
		if f.PCIGPUs != nil && *f.PCIGPUs == 0 && len(inv.GetDevices()) == 0 {
			return // A machine without GPUs needs no driver for them.
		}
	case nodev1.GpuUnknownCode_GPU_UNKNOWN_CODE_UNSPECIFIED, nodev1.GpuUnknownCode_GPU_UNKNOWN_CODE_NVML_ERROR,
		nodev1.GpuUnknownCode_GPU_UNKNOWN_CODE_NO_PROBE, nodev1.GpuUnknownCode_GPU_UNKNOWN_CODE_BAD_PROBE:
	}
	j.findings = append(j.findings, u)
}

// device judges what the inventory says of a GPU.
func (j *judge) device(d *nodev1.GpuDevice) {
	switch {
	case d.Missing:
		j.on(d, Finding{
			Verdict: Failed, Severity: SeverityFailed, Owner: OwnerHardware, Code: CodeMissing, EndsWork: true, Reason: d.Fault,
			Clears: "the driver lists it again (reboot the node); if it was taken out for good, tell the agent to forget it",
		})
	case d.Lost:
		j.lost(d, d.Fault)
	case d.Fault != "":
		j.on(d, Finding{
			Verdict: Unknown, Severity: SeverityDegraded, Owner: OwnerHardware, Code: CodeUnreadable, Reason: d.Fault, Clears: clearsWithNextProbe,
		})
	}
}

func (j *judge) lost(d *nodev1.GpuDevice, why string) {
	j.on(d, Finding{
		Verdict: Failed, Severity: SeverityFailed, Owner: OwnerHardware, Code: CodeLost, EndsWork: true, Reason: why, Clears: clearsReboot,
	})
}

// reading judges what a reading says of a GPU.
func (j *judge) reading(d *nodev1.GpuDevice, r *nodev1.GpuReading) {
	if r.Lost {
		j.lost(d, "the driver can't reach it: "+strings.Join(r.Errors, "; "))
		return
	}
	if len(r.Errors) > 0 && d.Fault == "" {
		j.on(d, Finding{
			Verdict: Unknown, Severity: SeverityDegraded, Owner: OwnerHardware, Code: CodeUnreadable,
			Reason: "could not read " + strings.Join(r.Errors, "; "), Clears: clearsWithNextProbe,
		})
	}
	j.recovery(d, r)
	j.memory(d, r)
	j.heat(d, r)
	j.links(d, r)
}

func (j *judge) recovery(d *nodev1.GpuDevice, r *nodev1.GpuReading) {
	f := Finding{Verdict: Failed, Severity: SeverityFailed, Owner: OwnerHardware, Code: CodeRecovery, Clears: clearsReset}
	switch r.Recovery {
	case nodev1.GpuRecovery_GPU_RECOVERY_UNSPECIFIED, nodev1.GpuRecovery_GPU_RECOVERY_NONE:
		return
	case nodev1.GpuRecovery_GPU_RECOVERY_RESET:
		f.Reason, f.EndsWork = "the driver says that it must be reset", true
	case nodev1.GpuRecovery_GPU_RECOVERY_REBOOT:
		f.Reason, f.EndsWork, f.Clears = "the driver says that the node must be rebooted", true, clearsReboot
	case nodev1.GpuRecovery_GPU_RECOVERY_DRAIN_PEERS:
		f.Reason, f.EndsWork = "the driver says that traffic between GPUs must stop, and then it must be reset", true
	case nodev1.GpuRecovery_GPU_RECOVERY_DRAIN_AND_RESET:
		f.Reason = "the driver says that it must be reset when its work is done"
	}
	j.on(d, f)
}

func (j *judge) memory(d *nodev1.GpuDevice, r *nodev1.GpuReading) {
	hardware := func(f Finding) {
		f.Owner = OwnerHardware
		j.on(d, f)
	}
	if r.GetRemapFailed() {
		hardware(Finding{
			Verdict: Failed, Severity: SeverityFailed, Code: CodeRemapFailed,
			Reason: "a faulty memory row could not be replaced", Clears: "replace the board: its spare rows are used up",
		})
	}
	if r.GetSramThresholdExceeded() {
		hardware(Finding{
			Verdict: Failed, Severity: SeverityFailed, Code: CodeOnChipErrors,
			Reason: "errors of its on-chip memory passed the vendor's threshold", Clears: "replace the board",
		})
	}
	if r.GetRemapPending() {
		hardware(Finding{
			Verdict: Degraded, Severity: SeverityDegraded, Code: CodeRemapPending,
			Reason: "a faulty memory row is replaced at the next reset", Clears: clearsRemap,
		})
	}
	if n := r.GetEccUncorrected(); n > 0 {
		hardware(Finding{
			Verdict: Degraded, Severity: SeverityDegraded, Code: CodeMemoryErrors,
			Reason: fmt.Sprintf("%d uncorrected memory errors since it was reset", n), Clears: "reset the GPU when it is idle",
		})
	}
}

var slowdowns = map[nodev1.GpuSlowdown]struct {
	words    string
	severity Severity
	verdict  Verdict
}{
	nodev1.GpuSlowdown_GPU_SLOWDOWN_HARDWARE:         {"hardware halves its clocks", SeverityDegraded, Degraded},
	nodev1.GpuSlowdown_GPU_SLOWDOWN_HARDWARE_THERMAL: {"hardware slows it down because it is too hot", SeverityDegraded, Degraded},
	nodev1.GpuSlowdown_GPU_SLOWDOWN_POWER_BRAKE:      {"the power supply slows it down", SeverityDegraded, Degraded},
	nodev1.GpuSlowdown_GPU_SLOWDOWN_SOFTWARE_THERMAL: {"the driver lowers its clocks because it is warm", SeverityInfo, OK},
}

func (j *judge) heat(d *nodev1.GpuDevice, r *nodev1.GpuReading) {
	const clears = "it is forgotten 5 minutes after it was last seen; look after cooling and power"
	expires := j.now.Add(slowedHolds)
	var hot []string
	if r.TemperatureC != nil && r.SlowdownC != nil && r.GetSlowdownC() > 0 && r.GetTemperatureC() >= r.GetSlowdownC() {
		hot = append(hot, fmt.Sprintf("%d °C, it slows down from %d °C", r.GetTemperatureC(), r.GetSlowdownC()))
	}
	if r.MemoryTemperatureC != nil && r.MemoryMaxC != nil && r.GetMemoryMaxC() > 0 && r.GetMemoryTemperatureC() >= r.GetMemoryMaxC() {
		hot = append(hot, fmt.Sprintf("memory at %d °C, it may be at %d °C", r.GetMemoryTemperatureC(), r.GetMemoryMaxC()))
	}
	if len(hot) > 0 {
		j.on(d, Finding{
			Verdict: Degraded, Severity: SeverityDegraded, Owner: OwnerSite, Code: CodeHot, Reason: strings.Join(hot, "; "), Clears: clears, Expires: expires,
		})
	}
	slowed := Finding{Owner: OwnerSite, Code: CodeSlowed, Clears: clears, Expires: expires}
	var words []string
	for _, s := range r.Slowdowns {
		if known, ok := slowdowns[s]; ok {
			words = append(words, known.words)
			slowed.Severity, slowed.Verdict = max(slowed.Severity, known.severity), max(slowed.Verdict, known.verdict)
		}
	}
	if len(words) > 0 {
		slowed.Reason = strings.Join(words, "; ")
		j.on(d, slowed)
	}
}

func (j *judge) links(d *nodev1.GpuDevice, r *nodev1.GpuReading) {
	if want := j.expectedLinks(d); r.NvlinksActive != nil && r.GetNvlinksActive() < want {
		j.on(d, Finding{
			Verdict: Failed, Severity: SeverityFailed, Owner: OwnerHardware, Code: CodeLinksDown, Clears: clearsLink,
			Reason: fmt.Sprintf("%d of %d NVLinks are up", r.GetNvlinksActive(), want),
		})
	}
	switch r.Fabric {
	case nodev1.GpuFabric_GPU_FABRIC_UNSPECIFIED, nodev1.GpuFabric_GPU_FABRIC_COMPLETED:
	case nodev1.GpuFabric_GPU_FABRIC_NOT_STARTED, nodev1.GpuFabric_GPU_FABRIC_IN_PROGRESS:
		j.on(d, Finding{
			Verdict: Failed, Severity: SeverityFailed, Owner: OwnerSite, Code: CodeFabric,
			Reason: "it has not joined its NVSwitch fabric, so that CUDA programs can't start", Clears: "start the service nvidia-fabricmanager, and wait until it is done",
		})
	case nodev1.GpuFabric_GPU_FABRIC_FAILED:
		j.on(d, Finding{
			Verdict: Failed, Severity: SeverityFailed, Owner: OwnerHardware, Code: CodeFabric,
			Reason: "it could not join its NVSwitch fabric", Clears: "see the log of nvidia-fabricmanager; then restart it or reboot the node",
		})
	}
}

// minAlike is how many other GPUs must agree on the number of links before one that never had as many is compared with them.
const minAlike = 3

// expectedLinks is the most that the GPU itself ever had up, or what all others of its model have up, if those are several and have
// equally many: a GPU that never had a bridge misses nothing.
func (j *judge) expectedLinks(d *nodev1.GpuDevice) uint32 {
	alike, count, equal := uint32(0), 0, true
	for _, r := range j.facts.Health.GetGpus() {
		other := j.deviceOf(r)
		if other == nil || other == d || other.Model != d.Model || r.NvlinksActive == nil {
			continue
		}
		equal = equal && (count == 0 || r.GetNvlinksActive() == alike)
		alike = r.GetNvlinksActive()
		count++
	}
	if equal && count >= minAlike {
		return max(d.NvlinksBest, alike)
	}
	return d.NvlinksBest
}

// xid judges an error.
func (j *judge) xid(x *nodev1.GpuRemembered) {
	row := XidOf(x.Xid.Xid)
	f := Finding{
		Verdict: [...]Verdict{OK, Degraded, Failed}[row.Severity], Severity: row.Severity, Owner: row.Owner, EndsWork: row.EndsWork,
		Code: fmt.Sprintf("%s%d", codeXidPrefix, x.Xid.Xid), Clears: row.Clears, Since: x.First.AsTime(),
		Reason: fmt.Sprintf("XID %d, %s", x.Xid.Xid, row.What),
	}
	if x.Count > 1 {
		f.Reason += fmt.Sprintf(" (%d times)", x.Count)
	}
	if row.Holds > 0 {
		if f.Expires = x.Last.AsTime().Add(row.Holds); !f.Expires.After(j.now) {
			return
		}
	}
	for _, d := range j.facts.Inventory.GetDevices() {
		if d.Mig == nil && x.Xid.Uuid != "" && d.Uuid == x.Xid.Uuid {
			j.on(d, f)
			return
		}
	}
	// The driver did not say which GPU, or it is none that we know: worth knowing, but no device can be blamed.
	f.Verdict, f.Severity, f.EndsWork = OK, SeverityInfo, false
	j.findings = append(j.findings, f)
}

// Remember adds an error to those that are remembered, and drops those that no longer count; equal ones are counted. The
// list is not changed. Beyond 256 different ones the oldest is forgotten.
func Remember(list []*nodev1.GpuRemembered, x *nodev1.GpuXid, now time.Time) []*nodev1.GpuRemembered {
	var kept []*nodev1.GpuRemembered
	added := &nodev1.GpuRemembered{Xid: x, First: timestamppb.New(now), Last: timestamppb.New(now), Count: 1}
	for _, r := range list {
		holds := XidOf(r.Xid.Xid).Holds
		switch {
		case holds > 0 && !r.Last.AsTime().Add(holds).After(now):
		case proto.Equal(r.Xid, x):
			added.First, added.Count = r.First, r.Count+1
		default:
			kept = append(kept, r)
		}
	}
	kept = append(kept, added)
	return kept[max(0, len(kept)-maxRemembered):]
}
