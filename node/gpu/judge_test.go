package gpu

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

var noon = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)

// judged returns the findings on a machine of 8 whose reading was changed.
func judged(change func(f *Facts, third *nodev1.GpuReading)) []Finding {
	f := Facts{Inventory: Merge(nil, machineOf(8)), Health: wellness(8)}
	change(&f, f.Health.Gpus[3])
	return Judge(f, noon)
}

func TestAHealthyMachineHasNoFindings(t *testing.T) {
	if found := judged(func(*Facts, *nodev1.GpuReading) {}); len(found) != 0 {
		t.Errorf("%+v", found)
	}
}

func TestReadingsAreJudged(t *testing.T) {
	for _, c := range []struct {
		what     string
		change   func(r *nodev1.GpuReading)
		code     string
		verdict  Verdict
		endsWork bool
	}{
		{"lost", func(r *nodev1.GpuReading) { r.Lost, r.Errors = true, []string{"reach it: gpu is lost"} }, CodeLost, Failed, true},
		{"lost without a name", func(r *nodev1.GpuReading) { r.Lost, r.Uuid = true, "" }, CodeLost, Failed, true},
		{"unreadable", func(r *nodev1.GpuReading) { r.Errors = []string{"power: unknown"} }, CodeUnreadable, Unknown, false},
		{"must be reset", func(r *nodev1.GpuReading) { r.Recovery = nodev1.GpuRecovery_GPU_RECOVERY_RESET }, CodeRecovery, Failed, true},
		{"must be reset later", func(r *nodev1.GpuReading) { r.Recovery = nodev1.GpuRecovery_GPU_RECOVERY_DRAIN_AND_RESET }, CodeRecovery, Failed, false},
		{"row pending", func(r *nodev1.GpuReading) { r.RemapPending = proto.Bool(true) }, CodeRemapPending, Degraded, false},
		{"row failed", func(r *nodev1.GpuReading) { r.RemapFailed = proto.Bool(true) }, CodeRemapFailed, Failed, false},
		{"memory errors", func(r *nodev1.GpuReading) { r.EccUncorrected = proto.Uint64(2) }, CodeMemoryErrors, Degraded, false},
		{"on-chip errors", func(r *nodev1.GpuReading) { r.SramThresholdExceeded = proto.Bool(true) }, CodeOnChipErrors, Failed, false},
		{"hot", func(r *nodev1.GpuReading) { r.TemperatureC = proto.Uint32(89) }, CodeHot, Degraded, false},
		{"slowed", func(r *nodev1.GpuReading) { r.Slowdowns = []nodev1.GpuSlowdown{2} }, CodeSlowed, Degraded, false},
		{"warm", func(r *nodev1.GpuReading) { r.Slowdowns = []nodev1.GpuSlowdown{4} }, CodeSlowed, OK, false},
		{"links", func(r *nodev1.GpuReading) { r.NvlinksActive = proto.Uint32(17) }, CodeLinksDown, Failed, false},
		{"fabric", func(r *nodev1.GpuReading) { r.Fabric = nodev1.GpuFabric_GPU_FABRIC_NOT_STARTED }, CodeFabric, Failed, false},
	} {
		found := judged(func(_ *Facts, r *nodev1.GpuReading) { c.change(r) })
		if len(found) != 1 {
			t.Errorf("%s: %+v", c.what, found)
			continue
		}
		f := found[0]
		if f.Code != c.code || f.Verdict != c.verdict || f.EndsWork != c.endsWork || !slices.Equal(f.Devices, []uint32{3}) || f.UUID != "GPU-3" {
			t.Errorf("%s: %+v", c.what, f)
		}
		if f.Reason == "" || f.Clears == "" || f.Owner == "" {
			t.Errorf("%s does not explain itself: %+v", c.what, f)
		}
		if v := VerdictOn(found, 3); v != c.verdict {
			t.Errorf("%s: verdict on device 3 is %v", c.what, v)
		}
		if v := VerdictOn(found, 4); v != OK {
			t.Errorf("%s: verdict on device 4 is %v", c.what, v)
		}
	}
}

func TestAbsentValuesAreNoFault(t *testing.T) {
	found := judged(func(f *Facts, _ *nodev1.GpuReading) {
		for i, r := range f.Health.Gpus {
			f.Health.Gpus[i] = &nodev1.GpuReading{Index: r.Index, Uuid: r.Uuid}
		}
	})
	if len(found) != 0 {
		t.Errorf("a driver that says nothing: %+v", found)
	}
}

func TestAGPUWithoutABridgeMissesNothing(t *testing.T) {
	found := judged(func(f *Facts, _ *nodev1.GpuReading) {
		for i := range f.Health.Gpus {
			links := uint32(18 * (i % 2))
			f.Health.Gpus[i].NvlinksActive = &links
			f.Inventory.Devices[i].NvlinksBest, f.Inventory.Devices[i].NvlinksActive = links, links
		}
	})
	if len(found) != 0 {
		t.Errorf("%+v", found)
	}
}

func TestLinksThatAreDownFromTheBeginningAreFoundByComparison(t *testing.T) {
	found := judged(func(f *Facts, r *nodev1.GpuReading) {
		r.NvlinksActive, f.Inventory.Devices[3].NvlinksBest = proto.Uint32(0), 0
	})
	if find(found, CodeLinksDown) == nil {
		t.Errorf("%+v", found)
	}
}

func TestUnknownIsNeverFailed(t *testing.T) {
	for code := range nodev1.GpuUnknownCode_name {
		for _, f := range judged(func(f *Facts, _ *nodev1.GpuReading) {
			f.Unknown = &nodev1.GpuUnknown{Code: nodev1.GpuUnknownCode(code), Sentence: "unknown: because"}
		}) {
			if f.Verdict != Unknown || f.Severity == SeverityFailed || f.EndsWork {
				t.Errorf("%v: %+v", nodev1.GpuUnknownCode(code), f)
			}
		}
	}
}

func TestAMachineWithoutGPUsNeedsNoDriver(t *testing.T) {
	u := &nodev1.GpuUnknown{Code: nodev1.GpuUnknownCode_GPU_UNKNOWN_CODE_NO_LIBRARY}
	if found := Judge(Facts{Unknown: u, PCIGPUs: proto.Uint32(0)}, noon); len(found) != 0 {
		t.Errorf("%+v", found)
	}
	if found := Judge(Facts{Unknown: u, PCIGPUs: proto.Uint32(8)}, noon); len(found) != 1 {
		t.Errorf("eight GPUs and no driver: %+v", found)
	}
}

func TestGPUsThatTheDriverLeavesOutAreToldOf(t *testing.T) {
	found := judged(func(f *Facts, _ *nodev1.GpuReading) { f.Inventory.PciGpus = proto.Uint32(9) })
	if f := find(found, CodeUnlisted); f == nil || f.Severity != SeverityInfo || !strings.Contains(f.Reason, "9") {
		t.Errorf("%+v", found)
	}
}

func remembered(uuid string, xid uint32, last time.Time) *nodev1.GpuRemembered {
	return &nodev1.GpuRemembered{
		Xid: &nodev1.GpuXid{Uuid: uuid, Xid: xid}, First: timestamppb.New(last), Last: timestamppb.New(last), Count: 1,
	}
}

func TestErrorsAreHardwaresOrTheApplications(t *testing.T) {
	hardware := []uint32{48, 64, 74, 79, 95, 119, 120}
	application := []uint32{13, 31, 43, 45}
	for _, n := range append(slices.Clone(hardware), application...) {
		found := judged(func(f *Facts, _ *nodev1.GpuReading) {
			f.Xids = []*nodev1.GpuRemembered{remembered("GPU-5", n, noon)}
		})
		if len(found) != 1 || found[0].Code != fmt.Sprintf("GPU_XID_%d", n) || !slices.Equal(found[0].Devices, []uint32{5}) {
			t.Errorf("XID %d: %+v", n, found)
			continue
		}
		f := found[0]
		if slices.Contains(hardware, n) && (f.Owner != OwnerHardware || f.Verdict != Failed || !f.EndsWork) {
			t.Errorf("XID %d is the hardware's: %+v", n, f)
		}
		if slices.Contains(application, n) && (f.Owner != OwnerApplication || f.Verdict != OK || f.EndsWork || f.Severity != SeverityInfo) {
			t.Errorf("XID %d is the application's: %+v", n, f)
		}
	}
}

func TestErrorsWithATraceAreForgottenAndOthersAreNot(t *testing.T) {
	found := judged(func(f *Facts, _ *nodev1.GpuReading) {
		for _, n := range []uint32{31, 63, 74, 94, 79, 119} {
			f.Xids = append(f.Xids, remembered("GPU-5", n, noon.Add(-time.Hour)))
		}
	})
	var codes []string
	for _, f := range found {
		codes = append(codes, f.Code)
	}
	if !slices.Equal(codes, []string{"GPU_XID_119", "GPU_XID_79"}) {
		t.Errorf("after an hour there are %v", codes)
	}
}

func TestAnErrorOfNoKnownGPUBlamesNone(t *testing.T) {
	for _, uuid := range []string{"", "GPU-elsewhere"} {
		found := judged(func(f *Facts, _ *nodev1.GpuReading) { f.Xids = []*nodev1.GpuRemembered{remembered(uuid, 79, noon)} })
		if len(found) != 1 || found[0].EndsWork || VerdictOn(found, 0) != OK {
			t.Errorf("XID 79 of %q: %+v", uuid, found)
		}
	}
}

func TestTheTableOfErrorsIsSound(t *testing.T) {
	seen := map[uint32]bool{}
	for _, x := range xids {
		if seen[x.Number] {
			t.Errorf("XID %d is there twice", x.Number)
		}
		seen[x.Number] = true
		if x.What == "" || x.Clears == "" {
			t.Errorf("XID %d does not explain itself", x.Number)
		}
		if x.EndsWork && (x.Owner != OwnerHardware || x.Severity != SeverityFailed) {
			t.Errorf("XID %d ends work and is %v of %v", x.Number, x.Severity, x.Owner)
		}
		if x.Owner == OwnerApplication && x.Holds == 0 {
			t.Errorf("XID %d is the application's and never forgotten", x.Number)
		}
	}
	if x := XidOf(65_000); x.EndsWork || x.Severity != SeverityInfo || x.Number != 65_000 {
		t.Errorf("an unknown error is %+v", x)
	}
}

func TestRememberedErrorsAreCountedAndBounded(t *testing.T) {
	var list []*nodev1.GpuRemembered
	for i := range 1000 {
		list = Remember(list, &nodev1.GpuXid{Uuid: "GPU-1", Xid: uint32(1000 + i%500)}, noon.Add(time.Duration(i)*time.Millisecond))
	}
	if len(list) != maxRemembered {
		t.Errorf("%d errors are remembered", len(list))
	}
	list = Remember(nil, &nodev1.GpuXid{Uuid: "GPU-1", Xid: 31}, noon)
	list = Remember(list, &nodev1.GpuXid{Uuid: "GPU-1", Xid: 31}, noon.Add(time.Minute))
	if len(list) != 1 || list[0].Count != 2 || !list[0].First.AsTime().Equal(noon) || !list[0].Last.AsTime().Equal(noon.Add(time.Minute)) {
		t.Errorf("the same error twice is %v", list)
	}
	if list = Remember(list, &nodev1.GpuXid{Uuid: "GPU-2", Xid: 79}, noon.Add(time.Hour)); len(list) != 1 {
		t.Errorf("an old error of the application is still remembered: %v", list)
	}
}

func TestAGPUThatNothingCanBeAllocatedOfIsNotTheWholeNode(t *testing.T) {
	inv := machineOf(2)
	inv.Devices[1] = &nodev1.GpuDevice{Index: 1, Lost: true, Fault: "the driver can't reach it"}
	found := Judge(Facts{Inventory: Merge(nil, inv)}, noon)
	if len(found) != 1 || found[0].Severity != SeverityInfo || found[0].EndsWork || VerdictOn(found, 0) != OK {
		t.Errorf("%+v", found)
	}
}
