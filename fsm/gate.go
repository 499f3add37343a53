package fsm

import (
	"crypto/sha256"
	"fmt"

	"github.com/google/uuid"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"

	"github.com/muster-hpc/muster/fsm/state"
)

const (
	// requestMemoryNs is how long an answer is remembered, and how old a request id may be, in nanoseconds of state time.
	requestMemoryNs = int64(15 * 60 * 1e9)
	// requestAheadNs is how far in the future of the leader's clock an id may have been minted.
	requestAheadNs = int64(2 * 60 * 1e9)
	// expirePerCommand bounds the answers forgotten by one command. Each command adds at most one, so that a backlog shrinks.
	expirePerCommand = 16
	// maxPrincipals bounds the cache of principals.
	maxPrincipals = 10_000
)

type principalKey struct {
	kind      apiv1.PrincipalKind
	uid       uint32
	name      string
	gid       uint32
	vouchedBy string
}

// command passes one command through the gates and applies it. An error stops the replica.
func (m *Machine) command(index, term uint64, ordinal uint32, cmd *logv1.Command) (*logv1.Result, error) {
	incarnation := m.s.Incarnation()
	begins := cmd.GetBootstrap() != nil && cmd.GetBootstrap().Incarnation > incarnation
	m.cmd = cmd
	m.rev = &apiv1.Revision{Incarnation: incarnation, Index: index, Ordinal: ordinal}

	if m.faults.UnknownIsNoOp && cmd.Op == nil {
		return &logv1.Result{Revision: m.rev}, nil
	}
	if refusal := m.gate(cmd, term); refusal != nil {
		if m.s.Bootstrapped() {
			m.s.Advance(m.rev, m.proposed(cmd))
		}
		return &logv1.Result{Refusal: refusal, Revision: m.rev}, nil
	}
	if !begins {
		m.s.Advance(m.rev, cmd.ProposedAt)
	}
	m.expire()

	id, remembered, refusal := m.recall(cmd)
	switch {
	case refusal != nil:
		return &logv1.Result{Refusal: refusal, Revision: m.rev}, nil
	case remembered != nil:
		return remembered, nil
	}
	result, err := m.dispatch(cmd)
	if err != nil {
		return nil, err
	}
	result.Revision = m.rev
	if cmd.RequestId != "" && m.s.Bootstrapped() && !m.faults.SkipRequestIDs {
		if err := m.remember(id, cmd, result); err != nil {
			return nil, err
		}
	}
	return result, nil
}

// proposed returns the command's time if it is one, and the state's otherwise.
func (m *Machine) proposed(cmd *logv1.Command) *timestamppb.Timestamp {
	if cmd.ProposedAt.CheckValid() != nil {
		return m.now()
	}
	return cmd.ProposedAt
}

// gate refuses what no operation needs to look at.
func (m *Machine) gate(cmd *logv1.Command, term uint64) *apiv1.ErrorDetail {
	if cmd.ProposedAt.CheckValid() != nil {
		return refuse("COMMAND_MALFORMED", "command", "the command has no valid time of proposal")
	}
	if !m.s.Bootstrapped() && cmd.GetBootstrap() == nil {
		return refuse("NOT_BOOTSTRAPPED", "cluster", "the cluster has not been bootstrapped; bootstrap it first")
	}
	if needs := m.ladder.Of(cmd); cmd.Level < needs {
		return refuse("LEVEL_MISSTATED", "command", "the command says that it needs feature level %d; it needs %d", cmd.Level, needs)
	}
	if m.s.Bootstrapped() && cmd.Level > m.s.Level() {
		return refuse("LEVEL_TOO_LOW", "cluster",
			"this needs feature level %d and the cluster is at level %d; upgrade every controller and raise the level", cmd.Level, m.s.Level())
	}
	if cmd.DecidedInTerm != 0 && cmd.DecidedInTerm != term {
		return refuse("STALE_TERM", "command",
			"this was decided in term %d and committed in term %d; the present leader decides again", cmd.DecidedInTerm, term)
	}
	return m.authorise(cmd)
}

// recall looks for the answer to a request that came before. At most one of answer and refusal is set.
func (m *Machine) recall(cmd *logv1.Command) (id state.RequestID, answer *logv1.Result, refusal *apiv1.ErrorDetail) {
	if cmd.RequestId == "" || m.faults.SkipRequestIDs {
		return id, nil, nil
	}
	subject := "request " + cmd.RequestId
	parsed, err := uuid.Parse(cmd.RequestId)
	if err != nil || parsed.Version() != 7 || parsed.Variant() != uuid.RFC4122 || parsed.String() != cmd.RequestId {
		return id, nil, refuse("REQUEST_ID_INVALID", subject,
			"the request id %q is not a UUID of version 7 in its usual lower-case form", cmd.RequestId)
	}
	if len(cmd.PayloadSha256) != sha256.Size {
		return id, nil, refuse("COMMAND_MALFORMED", subject, "the request comes without the SHA-256 of its contents")
	}
	id = state.RequestID(parsed)
	// An answer that is due to be forgotten counts as forgotten: when it is removed must not matter. Its id is too old then.
	if known := m.s.Request(id); known != nil && !m.expired(known) {
		if string(known.Payload[:]) != string(cmd.PayloadSha256) || !samePrincipal(known.Principal, cmd.Principal) {
			return id, nil, refuse("REQUEST_ID_REUSED", subject,
				"the request id %s was used before for another request or by another user; mint a new one for each request", cmd.RequestId)
		}
		answer = &logv1.Result{}
		if err := proto.Unmarshal(known.Result, answer); err != nil {
			panic("fsm: remembered answer cannot be decoded: " + err.Error()) // we encoded it
		}
		answer.RepeatedRequest = true
		return id, answer, nil
	}
	minted := id.MintedMillis() * 1e6
	if m.now() != nil && minted < m.nowNs()-requestMemoryNs {
		return id, nil, refuse("REQUEST_TOO_OLD", subject,
			"the request was made more than 15 minutes ago and its outcome is not remembered; look up whether it was done before asking again")
	}
	if minted > cmd.ProposedAt.Seconds*1e9+int64(cmd.ProposedAt.Nanos)+requestAheadNs {
		return id, nil, refuse("REQUEST_FROM_FUTURE", subject,
			"the request id was minted more than 2 minutes in the future; set the clock of the machine that sent it")
	}
	return id, nil, nil
}

// remember stores the answer to a request.
func (m *Machine) remember(id state.RequestID, cmd *logv1.Command, result *logv1.Result) error {
	encoded, err := state.EncodeResult(result)
	if err != nil {
		return fmt.Errorf("encode the answer: %w", err)
	}
	m.s.PutRequest(&state.Request{
		ID: id, Payload: [32]byte(cmd.PayloadSha256), Principal: m.shared(cmd.Principal), AnsweredNs: m.nowNs(), Result: encoded,
	})
	return nil
}

// shared returns an equal principal that other records have already.
func (m *Machine) shared(p *apiv1.Principal) *apiv1.Principal {
	key := principalKey{p.Kind, p.Uid, p.Name, p.Gid, p.VouchedBy}
	if known := m.principals[key]; known != nil {
		return known
	}
	if len(m.principals) >= maxPrincipals {
		clear(m.principals)
	}
	m.principals[key] = p
	return p
}

// expire forgets answers that are older than the memory, a few at a time.
func (m *Machine) expire() {
	if m.now() == nil {
		return
	}
	for range expirePerCommand {
		oldest := m.s.OldestRequest()
		if oldest == nil || !m.expired(oldest) {
			return
		}
		m.s.RemoveRequest(oldest)
	}
}

// expired reports whether an answer is due to be forgotten.
func (m *Machine) expired(r *state.Request) bool { return r.ExpiryNs() < m.nowNs()-requestMemoryNs }

// samePrincipal reports whether two principals are the same person or machine. Which node vouched does not matter: a user
// may repeat a request from another host.
func samePrincipal(a, b *apiv1.Principal) bool {
	return a.GetKind() == b.GetKind() && a.GetUid() == b.GetUid() && a.GetName() == b.GetName()
}

// refuse makes a refusal.
func refuse(reason, subject, sentence string, args ...any) *apiv1.ErrorDetail {
	return &apiv1.ErrorDetail{Reason: reason, Subject: subject, Sentence: fmt.Sprintf(sentence, args...)}
}

// refused makes the result of a command that changed nothing.
func refused(detail *apiv1.ErrorDetail) *logv1.Result { return &logv1.Result{Refusal: detail} }
