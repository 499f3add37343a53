package value

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// Bounds of --signal, as Slurm has them; rows of docs/limits.md.
const (
	// warnLead is how many seconds before the time limit a signal comes that is given without a time.
	warnLead = 60
	// warnMost is the earliest that a signal can come before the time limit, in seconds.
	warnMost = 65_535
)

// WarnSignal reads "[{R|B}:]SIGNAL[@SECONDS]" of --signal. R speaks of reservations, of which there are none; B (batch) is refused
// unless it is allowed.
func WarnSignal(s string, batch bool) (*apiv1.WarnSignal, error) {
	w := &apiv1.WarnSignal{LeadS: warnLead}
	if flags, rest, given := strings.Cut(s, ":"); given {
		for _, flag := range strings.ToUpper(flags) {
			switch {
			case flag == 'B' && batch:
				w.BatchOnly = true
			case flag == 'R':
			default:
				return nil, ErrInvalid
			}
		}
		if flags == "" {
			return nil, ErrInvalid
		}
		s = rest
	}
	name, lead, timed := strings.Cut(s, "@")
	n, err := Signal(name)
	if err != nil {
		return nil, err
	}
	w.Signal = uint32(n)
	if timed {
		seconds, err := Count(lead, 0)
		if err != nil || seconds > warnMost {
			return nil, ErrInvalid
		}
		w.LeadS = seconds
	}
	return w, nil
}

// BindError is a binding that is known and not supported; any other that cannot be read is ErrInvalid.
type BindError struct{ why string }

// Error says why.
func (e *BindError) Error() string { return e.why }

// CPUBind reads "[{quiet|verbose},]TYPE" of --cpu-bind into the form of TaskOptions.cpu_bind.
func CPUBind(s string) (string, error) {
	return bind(s, map[string]string{
		"none": "none", "no": "none", "n": "none", "rank": "rank", "threads": "threads", "thread": "threads", "cores": "cores", "core": "cores",
		"sockets": "sockets", "socket": "sockets",
	}, nil, map[string]string{"map_cpu": "map_cpu", "mask_cpu": "mask_cpu"}, map[string]string{
		"ldoms": ofDomains, "ldom": ofDomains, "rank_ldom": ofDomains, "map_ldom": ofDomains, "mask_ldom": ofDomains,
		"boards": ofDomains, "board": ofDomains,
	})
}

// ofDomains is why some bindings are refused.
const ofDomains = "tasks are bound to threads, cores or sockets, by rank, or by a list of CPUs (map_cpu, mask_cpu)"

// GPUBind reads "[{quiet|verbose},]TYPE" of --gpu-bind into the form of TaskOptions.gpu_bind.
func GPUBind(s string) (string, error) {
	return bind(s, map[string]string{"none": "none", "no": "none", "closest": "closest"},
		map[string]string{"single": "single", "per_task": "per_task"},
		map[string]string{"map": "map_gpu", "map_gpu": "map_gpu", "mask": "mask_gpu", "mask_gpu": "mask_gpu"}, nil)
}

// bind reads a binding: a word, a word with a number, or a word with a list, after "quiet," or "verbose,".
func bind(s string, words, numbered, listed, refused map[string]string) (string, error) {
	text, verbose := strings.ToLower(s), ""
	for text != "" {
		head, rest, more := strings.Cut(text, ",")
		if head == "verbose" || head == "v" {
			verbose = "verbose"
		} else if head != "quiet" && head != "q" {
			break
		}
		if text = rest; more && rest == "" {
			return "", ErrInvalid
		}
	}
	if text == "" {
		return verbose, nil
	}
	word, list, hasList := strings.Cut(text, ":")
	if why := refused[word]; why != "" {
		return "", &BindError{why}
	}
	switch {
	case words[word] != "" && !hasList:
		text = words[word]
	case numbered[word] != "":
		n, err := strconv.ParseUint(list, 10, 16)
		if err != nil || n == 0 {
			return "", ErrInvalid
		}
		text = fmt.Sprintf("%s:%d", numbered[word], n)
	case listed[word] != "":
		if !validList(list, strings.HasPrefix(word, "mask")) {
			return "", ErrInvalid
		}
		text = listed[word] + ":" + list
	default:
		return "", ErrInvalid
	}
	if verbose != "" {
		return verbose + "," + text, nil
	}
	return text, nil
}

// validList reads numbers, each perhaps with "*TIMES": of CPUs in decimal, of masks in hexadecimal.
func validList(list string, masks bool) bool {
	for item := range strings.SplitSeq(list, ",") {
		number, times, repeated := strings.Cut(item, "*")
		digits := number
		if masks {
			digits = strings.TrimPrefix(number, "0x")
			if digits == "" || strings.Trim(digits, "0123456789abcdef") != "" {
				return false
			}
		} else if _, err := strconv.ParseUint(strings.TrimPrefix(number, "0x"), base(number), 32); err != nil {
			return false
		}
		if n, err := strconv.ParseUint(times, 10, 16); repeated && (err != nil || n == 0) {
			return false
		}
	}
	return true
}

func base(number string) int {
	if strings.HasPrefix(number, "0x") {
		return 16
	}
	return 10
}

// Distribution reads "NODES[:SOCKETS[:CORES]][,{Pack|NoPack}]" of --distribution into the form of TaskOptions.distribution, in lower case.
// arbitrary tells whether ranks go where a list says.
func Distribution(s string) (text string, arbitrary bool, err error) {
	text, pack, packed := strings.Cut(strings.ToLower(s), ",")
	switch {
	case packed && pack == "pack":
		return "", false, &BindError{"tasks are counted out evenly over the nodes"}
	case packed && pack != "nopack":
		return "", false, ErrInvalid
	}
	words := strings.Split(text, ":")
	if len(words) > 3 {
		return "", false, ErrInvalid
	}
	plain := true
	for _, word := range words[1:] {
		if !slices.Contains([]string{"*", "block", "cyclic", "fcyclic"}, word) {
			return "", false, ErrInvalid
		}
		plain = plain && word == "*"
	}
	size, plane := strings.CutPrefix(words[0], "plane=")
	switch {
	case plane:
		if n, err := strconv.ParseUint(size, 10, 16); err != nil || n == 0 {
			return "", false, ErrInvalid
		}
	case words[0] == "*":
		words[0] = "block"
	case words[0] != "block" && words[0] != "cyclic" && words[0] != "arbitrary":
		return "", false, ErrInvalid
	}
	if plain {
		words = words[:1]
	}
	return strings.Join(words, ":"), words[0] == "arbitrary", nil
}

// limits are the names of --propagate.
var limits = []string{"AS", "CORE", "CPU", "DATA", "FSIZE", "MEMLOCK", "NOFILE", "NPROC", "RSS", "STACK"}

// LimitNames reads "ALL", "NONE" or a list of limits of --propagate; "" means ALL. The names come without RLIMIT_.
func LimitNames(s string) ([]string, error) {
	if s == "" {
		return limits, nil
	}
	var names []string
	for word := range strings.SplitSeq(strings.ToUpper(s), ",") {
		word = strings.TrimPrefix(word, "RLIMIT_")
		switch {
		case word == "ALL":
			return limits, nil
		case word == "NONE":
			return nil, nil
		case !slices.Contains(limits, word):
			return nil, ErrInvalid
		case !slices.Contains(names, word):
			names = append(names, word)
		}
	}
	return names, nil
}

// GresList reads a --gres list: "gpu", "gpu:2", "gpu:h100:4,gpu:a100:1", "gres:ib:1", "gpu:a100=1". "none" and "" ask for nothing. Counts
// of one name and type are added up.
func GresList(s string) ([]*apiv1.GresRequest, error) {
	if strings.EqualFold(s, "none") || s == "" || strings.EqualFold(s, "NULL") {
		return nil, nil
	}
	var list []*apiv1.GresRequest
	for item := range strings.SplitSeq(s, ",") {
		g, err := gres(item)
		if err != nil {
			return nil, err
		}
		added := false
		for _, other := range list {
			switch {
			case other.Name != g.Name:
			case (other.Type == "") != (g.Type == ""):
				return nil, ErrGresMixed
			case other.Type == g.Type:
				other.Count, added = other.Count+g.Count, true
			}
		}
		if !added {
			list = append(list, g)
		}
	}
	return list, nil
}

func gres(item string) (*apiv1.GresRequest, error) {
	item = strings.TrimPrefix(strings.TrimPrefix(item, "gres:"), "gres/")
	parts := strings.Split(strings.ReplaceAll(item, "=", ":"), ":")
	g := &apiv1.GresRequest{Name: parts[0], Count: 1}
	if len(parts) > 3 || !gresWord(g.Name) || g.Name == "shard" || g.Name == "mps" { // accelerators are never split among jobs
		return nil, ErrGres
	}
	for i, part := range parts[1:] {
		number, numeric := gresNumber(part)
		switch {
		case numeric && i == len(parts)-2:
			g.Count = number
		case i == 0 && gresWord(part):
			g.Type = strings.ToLower(part)
		default:
			return nil, ErrGres
		}
	}
	return g, nil
}

// gresWord tells whether a word can be the name or type of a resource; a MIG profile ("2g.24gb") begins with a digit.
func gresWord(s string) bool {
	return s != "" && s[0] != '-' && strings.IndexFunc(s, func(c rune) bool {
		return !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c == '-' || c == '.')
	}) < 0
}
