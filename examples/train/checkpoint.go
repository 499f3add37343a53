package main

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
)

// A checkpoint is one safetensors file, "step-00000200.safetensors": 8 bytes with the length of the header (little
// endian), the header in JSON, the numbers. The header's metadata hold the step, the settings that must not change
// across a resume, and the SHA-256 of the numbers. The file is written under a temporary name, synced, and renamed.

const (
	checkpointPattern = "step-%08d.safetensors"
	checkpointGlob    = "step-*.safetensors"
	headerLimit       = 1 << 20 // bytes; a real header has a few hundred
)

// progress is all that a run needs to go on.
type progress struct {
	step     int // steps done
	params   []float32
	velocity []float32
}

// settings are what a resumed run must share with the one that saved.
type settings struct {
	hidden int
	seed   uint64
	batch  int
}

func (s settings) metadata(step int, sum string) map[string]string {
	return map[string]string{
		"step":   strconv.Itoa(step),
		"hidden": strconv.Itoa(s.hidden),
		"seed":   strconv.FormatUint(s.seed, 10),
		"batch":  strconv.Itoa(s.batch),
		"sha256": sum,
	}
}

type tensorInfo struct {
	Type    string `json:"dtype"`
	Shape   []int  `json:"shape"`
	Offsets [2]int `json:"data_offsets"`
}

// save writes a checkpoint and returns its path. When it returns without error the checkpoint survives a power cut.
func save(dir string, s settings, p progress) (string, error) {
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return "", fmt.Errorf("make the checkpoint directory: %w", err)
	}
	data := encode(p)
	sum := sha256.Sum256(data)
	header := map[string]any{"__metadata__": s.metadata(p.step, hex.EncodeToString(sum[:]))}
	offset := 0
	for _, prefix := range []string{"", "velocity."} {
		w1, b1, w2, b2 := views(p.params, s.hidden)
		for _, t := range []struct {
			name  string
			shape []int
			count int
		}{
			{"w1", []int{s.hidden, pixels}, len(w1)}, {"b1", []int{s.hidden}, len(b1)},
			{"w2", []int{classes, s.hidden}, len(w2)}, {"b2", []int{classes}, len(b2)},
		} {
			header[prefix+t.name] = tensorInfo{Type: "F32", Shape: t.shape, Offsets: [2]int{offset, offset + 4*t.count}}
			offset += 4 * t.count
		}
	}
	text, err := json.Marshal(header)
	if err != nil {
		return "", fmt.Errorf("encode the checkpoint's header: %w", err)
	}
	for len(text)%8 != 0 {
		text = append(text, ' ') // tensors are aligned to 8 bytes
	}
	contents := binary.LittleEndian.AppendUint64(nil, uint64(len(text)))
	contents = append(append(contents, text...), data...)
	path := filepath.Join(dir, fmt.Sprintf(checkpointPattern, p.step))
	if err := writeDurably(path, contents); err != nil {
		return "", fmt.Errorf("save step %d: %w", p.step, err)
	}
	return path, nil
}

// writeDurably makes contents appear at path as a whole and for good, or not at all.
func writeDurably(path string, contents []byte) error {
	dir := filepath.Dir(path)
	file, err := os.CreateTemp(dir, "."+filepath.Base(path)+".tmp-*")
	if err != nil {
		return err
	}
	defer os.Remove(file.Name()) // a no-op after the rename
	_, err = file.Write(contents)
	if err == nil {
		err = file.Sync()
	}
	if closeErr := file.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		return err
	}
	parent, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer parent.Close()
	return parent.Sync()
}

// resume returns the newest complete checkpoint in dir and its path, or an empty path if there is none. Files that are
// torn are passed over, each with a sentence in skipped. A complete checkpoint of other settings is an error: to train
// from the beginning beside it would overwrite somebody's work.
func resume(dir string, s settings) (p progress, path string, skipped []string, err error) {
	names, err := filepath.Glob(filepath.Join(dir, checkpointGlob))
	if err != nil {
		return progress{}, "", nil, fmt.Errorf("look for checkpoints in %s: %w", dir, err)
	}
	slices.Sort(names) // the step has a fixed number of digits
	for _, name := range slices.Backward(names) {
		p, err := load(name, s)
		var other *otherSettingsError
		switch {
		case err == nil:
			return p, name, skipped, nil
		case errors.As(err, &other), errors.Is(err, fs.ErrPermission):
			return progress{}, "", skipped, err
		}
		skipped = append(skipped, err.Error())
	}
	return progress{}, "", skipped, nil
}

// otherSettingsError says that a checkpoint belongs to another training.
type otherSettingsError struct{ path, name, have, want string }

func (e *otherSettingsError) Error() string {
	return fmt.Sprintf("%s was saved with %s %s, this run has %s: choose another --dir or the same settings", e.path, e.name, e.have, e.want)
}

// load reads one checkpoint and checks that it is whole.
func load(path string, s settings) (progress, error) {
	contents, err := os.ReadFile(path)
	if err != nil {
		return progress{}, fmt.Errorf("read checkpoint: %w", err)
	}
	if len(contents) < 8 {
		return progress{}, fmt.Errorf("%s is incomplete: %d bytes", path, len(contents))
	}
	size := binary.LittleEndian.Uint64(contents)
	if size > headerLimit || size > uint64(len(contents)-8) {
		return progress{}, fmt.Errorf("%s is incomplete: its header has %d bytes, the file %d", path, size, len(contents))
	}
	var header struct {
		Metadata map[string]string `json:"__metadata__"`
	}
	if err := json.Unmarshal(contents[8:8+size], &header); err != nil {
		return progress{}, fmt.Errorf("%s has an unreadable header: %w", path, err)
	}
	data := contents[8+size:]
	sum := sha256.Sum256(data)
	if have := hex.EncodeToString(sum[:]); have != header.Metadata["sha256"] {
		return progress{}, fmt.Errorf("%s is torn: its numbers have the hash %.12s, the header says %.12s", path, have, header.Metadata["sha256"])
	}
	step, err := strconv.Atoi(header.Metadata["step"])
	if err != nil || step < 0 {
		return progress{}, fmt.Errorf("%s has no step number", path)
	}
	want := s.metadata(step, "")
	for _, name := range []string{"hidden", "seed", "batch"} {
		if header.Metadata[name] != want[name] {
			return progress{}, &otherSettingsError{path, name, header.Metadata[name], want[name]}
		}
	}
	count := paramCount(s.hidden)
	if len(data) != 2*4*count {
		return progress{}, fmt.Errorf("%s has %d bytes of numbers, expected %d", path, len(data), 2*4*count)
	}
	numbers := make([]float32, 2*count)
	for i := range numbers {
		numbers[i] = math.Float32frombits(binary.LittleEndian.Uint32(data[4*i:]))
	}
	return progress{step: step, params: numbers[:count], velocity: numbers[count:]}, nil
}

func encode(p progress) []byte {
	data := make([]byte, 0, 4*(len(p.params)+len(p.velocity)))
	for _, v := range [][]float32{p.params, p.velocity} {
		for _, x := range v {
			data = binary.LittleEndian.AppendUint32(data, math.Float32bits(x))
		}
	}
	return data
}

// prune removes all but the newest keep checkpoints, and temporary files of writers that died.
func prune(dir string, keep int) error {
	names, err := filepath.Glob(filepath.Join(dir, checkpointGlob))
	if err != nil {
		return err
	}
	slices.Sort(names)
	leftovers, err := filepath.Glob(filepath.Join(dir, "."+checkpointGlob+".tmp-*"))
	if err != nil {
		return err
	}
	for _, name := range append(names[:max(len(names)-keep, 0)], leftovers...) {
		if err := os.Remove(name); err != nil {
			return fmt.Errorf("remove an old checkpoint: %w", err)
		}
	}
	return nil
}
