package gpu

import "time"

// Verdict is how a device is, as far as one finding says.
type Verdict int

// Verdicts, worst last. Unknown is worse than degraded for display only: it is never a reason to end work.
const (
	// OK means usable.
	OK Verdict = iota
	// Degraded means usable, and others are better.
	Degraded
	// Unknown means that it could not be found out.
	Unknown
	// Failed means not usable.
	Failed
)

// String returns "ok", "degraded", "unknown" or "failed".
func (v Verdict) String() string { return [...]string{"ok", "degraded", "unknown", "failed"}[v] }

// Severity is what a finding means for new work.
type Severity int

// Severities, worst last.
const (
	// SeverityInfo is worth knowing.
	SeverityInfo Severity = iota
	// SeverityDegraded means that other devices are preferred.
	SeverityDegraded
	// SeverityFailed means that the devices get no new work.
	SeverityFailed
)

// String returns "info", "degraded" or "failed".
func (s Severity) String() string { return [...]string{"info", "degraded", "failed"}[s] }

// Owner is whose matter a finding is.
type Owner string

// Owners.
const (
	// OwnerHardware: device, board or vendor's driver.
	OwnerHardware Owner = "hardware"
	// OwnerApplication: the program that ran.
	OwnerApplication Owner = "application"
	// OwnerSite: whoever runs the machine (installation, cooling, power, foreign processes).
	OwnerSite Owner = "site"
)

// Codes of findings; those of errors are "GPU_XID_" and the number.
const (
	CodeLost            = "GPU_LOST"
	CodeMissing         = "GPU_MISSING"
	CodeUnlisted        = "GPU_UNLISTED"
	CodeUnreadable      = "GPU_UNREADABLE"
	CodeRecovery        = "GPU_RECOVERY_WANTED"
	CodeRemapPending    = "GPU_ROW_REMAP_PENDING"
	CodeRemapFailed     = "GPU_ROW_REMAP_FAILED"
	CodeMemoryErrors    = "GPU_MEMORY_ERRORS"
	CodeOnChipErrors    = "GPU_ONCHIP_ERRORS"
	CodeHot             = "GPU_HOT"
	CodeSlowed          = "GPU_SLOWED"
	CodeLinksDown       = "GPU_NVLINKS_DOWN"
	CodeFabric          = "GPU_FABRIC"
	CodeProcessLeft     = "GPU_PROCESS_LEFT"
	CodeProbeUnknown    = "GPU_PROBE_UNKNOWN"
	CodeProbeTimeout    = "GPU_PROBE_TIMEOUT"
	CodeProbeStuck      = "GPU_PROBE_STUCK"
	CodeDriverUnknown   = "GPU_DRIVER_UNKNOWN"
	codeXidPrefix       = "GPU_XID_"
	sentenceNotReadYet  = "the node's GPUs have not been read yet"
	clearsWithNextProbe = "the next reading that succeeds"
)

// Finding is one thing that was found out about devices. Of one code and device there is at most one.
type Finding struct {
	// Verdict on the devices.
	Verdict Verdict
	// Severity for new work.
	Severity Severity
	// Owner whose matter it is.
	Owner Owner
	// Code, upper snake case, stable.
	Code string
	// Reason is one sentence.
	Reason string
	// Clears is what would clear it, a sentence.
	Clears string
	// EndsWork: what uses the devices can't go on and ends as a failure of hardware.
	EndsWork bool
	// UUID of the GPU; empty if it concerns the node.
	UUID string
	// Devices are the numbers of the devices concerned, ascending: the GPU, or its MIG instances. Empty if it concerns the
	// node, or a GPU of which nothing can be allocated; then the severity is info.
	Devices []uint32
	// Since is when it was found first.
	Since time.Time
	// Expires is when it is forgotten by itself; zero means when it is no longer found.
	Expires time.Time
}

// VerdictOn returns the worst verdict of the findings on a device, the node's own included.
func VerdictOn(findings []Finding, device uint32) Verdict {
	worst := OK
	for _, f := range findings {
		concerned := f.UUID == "" && len(f.Devices) == 0 && f.Severity > SeverityInfo
		for _, d := range f.Devices {
			concerned = concerned || d == device
		}
		if concerned {
			worst = max(worst, f.Verdict)
		}
	}
	return worst
}
