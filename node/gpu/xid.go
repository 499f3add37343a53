package gpu

import "time"

// Xid says what an error that NVIDIA's driver reports by number means for work.
//
// Source of numbers, names and immediate actions: NVIDIA, "Xid Errors", chapter "Analyzing Xid Errors with the Xid
// Catalog", https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html (drivers R550 to R580). The catalogue's action
// decides the row: RESTART_APP and CHECK_APP are the application's matter; IGNORE is a note; RESET_GPU and RESTART_BM end
// what runs there; where the catalogue gives a workflow, the row follows the workflow's first outcome.
type Xid struct {
	// Number in the catalogue.
	Number uint32
	// What it is, in a few words.
	What string
	// Owner whose matter it is.
	Owner Owner
	// Severity for new work.
	Severity Severity
	// EndsWork: what runs on the GPU can't go on.
	EndsWork bool
	// Clears is what would clear it.
	Clears string
	// Holds is how long the finding stays after the last such error; 0 means until the GPU was reset and that was told, or
	// the machine booted. Errors that leave a trace in the readings (remapped rows, links, a lost GPU) hold only for a
	// while: after that the readings decide.
	Holds time.Duration
}

const (
	// xidNote is how long an error is shown that says something of the application or is only worth knowing.
	xidNote = 10 * time.Minute
	// xidTrace is how long an error counts whose trace is in the readings.
	xidTrace = 10 * time.Minute
)

// What clears errors.
const (
	clearsApp    = "nothing has to be done to the node: look for the fault in the program first"
	clearsNote   = "it is forgotten after 10 minutes; if it comes often, ask the vendor"
	clearsReset  = "reset the GPU (nvidia-smi --gpu-reset) or reboot the node; if it comes back, ask the vendor"
	clearsReboot = "reboot the node; if it comes back, have the GPU's seat, power and board checked"
	clearsRemap  = "reset the GPU when it is idle, so that the remapped rows are used"
	clearsLink   = "reset the GPUs of the link or reboot the node; if it comes back, have cables and seats of the board checked"
)

func application(n uint32, what string) Xid {
	return Xid{n, what, OwnerApplication, SeverityInfo, false, clearsApp, xidNote}
}

func note(n uint32, what string) Xid {
	return Xid{n, what, OwnerHardware, SeverityInfo, false, clearsNote, xidNote}
}

func reset(n uint32, what string) Xid {
	return Xid{n, what, OwnerHardware, SeverityFailed, true, clearsReset, 0}
}

func link(n uint32, what string) Xid {
	return Xid{n, what, OwnerHardware, SeverityFailed, true, clearsLink, xidTrace}
}

// xids is the table. Numbers that are not in it are unknown to us, see XidOf.
var xids = []Xid{
	application(13, "exception in the graphics engine: usually an access out of bounds or an illegal instruction"),
	application(31, "page fault in GPU memory: usually an access to an illegal address"),
	application(32, "corrupted stream of commands"),
	application(39, "exception in a copy engine"),
	application(40, "exception in a copy engine"),
	application(41, "exception in a copy engine"),
	application(43, "the GPU stopped processing for a program that made a fault"),
	application(44, "fault in the graphics engine during a context switch"),
	application(45, "the driver cleaned up after a program that ended or failed"),
	reset(46, "the GPU stopped processing"),
	reset(48, "uncorrectable memory error (double bit)"),
	reset(61, "breakpoint of the power management unit"),
	reset(62, "halt of the power management unit"),
	{63, "a memory row was remapped, or a page retired", OwnerHardware, SeverityInfo, false, clearsRemap, xidTrace},
	{64, "a memory row could not be remapped, or a page not retired", OwnerHardware, SeverityFailed, true, clearsReset, xidTrace},
	application(68, "exception in a video decoder"),
	application(69, "error of the graphics engine's class"),
	application(70, "exception in a copy engine"),
	application(71, "exception in a copy engine"),
	application(72, "exception in a copy engine"),
	link(74, "error of an NVLink"),
	application(75, "exception in a copy engine"),
	application(76, "exception in a copy engine"),
	application(77, "exception in a copy engine"),
	{79, "the GPU has fallen off the bus", OwnerHardware, SeverityFailed, true, clearsReboot, 0},
	application(80, "corrupted data sent to the GPU"),
	note(92, "many corrected memory errors"),
	note(93, "the board's memory for configuration was erased too often"),
	{94, "memory error contained to one program, which fails", OwnerHardware, SeverityInfo, false, clearsRemap, xidTrace},
	reset(95, "uncontained memory error: every program on the GPU may have wrong data"),
	note(106, "test message"),
	note(107, "test message"),
	note(108, "address of another GPU could not be translated"),
	reset(109, "context switch took too long"),
	reset(110, "security fault"),
	reset(119, "the GPU's system processor did not answer"),
	reset(120, "error of the GPU's system processor"),
	note(121, "corrected error between processor and GPU (C2C)"),
	link(136, "an NVLink could not be trained"),
	note(137, "NVLink access without permission, usually after an error of another GPU"),
	reset(140, "uncorrected memory error"),
	note(141, "error in the fast path of the driver"),
	reset(143, "the GPU could not be initialised"),
	link(144, "NVLink error (SAW)"),
	link(145, "NVLink error (RLW)"),
	link(146, "NVLink error (TLW)"),
	note(147, "NVLink note (TREX)"),
	note(148, "NVLink note (NVLPW)"),
	link(149, "NVLink error (NETIR)"),
	link(150, "NVLink error (MSE)"),
	{151, "keys could not be rotated", OwnerHardware, SeverityFailed, true, clearsReboot, 0},
	note(154, "what the driver wants done with the GPU changed"),
	reset(155, "NVLink error found by software"),
	{156, "a part of the GPU was retired", OwnerHardware, SeverityDegraded, false, clearsRemap, 0},
	note(157, "a part of the GPU could not be retired"),
	reset(158, "a unit of the GPU does not answer"),
	note(160, "a memory channel was retired"),
	note(161, "a memory channel could not be retired"),
	reset(167, "PCI Express does not answer"),
	reset(171, "uncorrectable memory error (DRAM)"),
	reset(172, "uncorrectable memory error (on-chip)"),
}

// XidOf returns what an error means. One that is not in the table is worth knowing and changes nothing: the readings will
// show whether the GPU still works.
func XidOf(number uint32) Xid {
	for _, x := range xids {
		if x.Number == number {
			return x
		}
	}
	return note(number, "error that is not in Muster's table; see NVIDIA's catalogue of Xid errors")
}
