package rpc

// Bounds of calls; rows of docs/limits.md.
const (
	// MaxRequestBytes bounds one request message.
	MaxRequestBytes = 16 << 20
	// MaxResponseBytes bounds one response message, as clients accept it.
	MaxResponseBytes = 64 << 20
	// MaxUserCalls bounds the calls of users that one controller or agent serves at the same time.
	MaxUserCalls = 8192
	// UserShare is the part of them that one user may have who is no operator: a quarter.
	UserShare = 4
	// MaxJobsPerSubmit bounds the jobs of one SubmitJobs.
	MaxJobsPerSubmit = 1000
	// MaxScriptBytes bounds a batch script.
	MaxScriptBytes = 4 << 20
	// MaxEnvironmentBytes bounds an environment.
	MaxEnvironmentBytes = 1 << 20
	// MaxBlobPieceBytes bounds a piece of a blob that is stored by one command.
	MaxBlobPieceBytes = 192 << 10
	// MaxPageSize bounds the items of one page of a list; 0 in a request means this.
	MaxPageSize = 10_000
)

// LeaderHeader is the response header in which a controller names the API address of the leader, if it knows it.
const LeaderHeader = "Muster-Leader"
