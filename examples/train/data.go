package main

import (
	"bytes"
	"compress/gzip"
	_ "embed"
	"encoding/csv"
	"fmt"
	"math/rand/v2"
	"strconv"
)

//go:embed data/digits.csv.gz
var digitsCSV []byte

const (
	pixels     = 64   // values of an image
	classes    = 10   // digits
	trainCount = 1500 // images to learn from; the rest measure accuracy
	greyMax    = 16   // highest grey value in the file
)

// sample is one image with the digit it shows.
type sample struct {
	image [pixels]float32 // 0 to 1
	label int             // 0 to 9
}

// loadDigits decodes the data that is part of the program, and splits it into training and held-out samples.
func loadDigits() (train, heldOut []sample, err error) {
	unzipped, err := gzip.NewReader(bytes.NewReader(digitsCSV))
	if err != nil {
		return nil, nil, fmt.Errorf("unpack the digits: %w", err)
	}
	rows, err := csv.NewReader(unzipped).ReadAll()
	if err != nil {
		return nil, nil, fmt.Errorf("read the digits: %w", err)
	}
	all := make([]sample, len(rows))
	for i, row := range rows {
		if len(row) != pixels+1 {
			return nil, nil, fmt.Errorf("digits, line %d: %d values, expected %d", i+1, len(row), pixels+1)
		}
		for p, text := range row[:pixels] {
			grey, err := strconv.ParseFloat(text, 32)
			if err != nil {
				return nil, nil, fmt.Errorf("digits, line %d, value %d: %w", i+1, p+1, err)
			}
			all[i].image[p] = float32(grey) / greyMax
		}
		label, err := strconv.Atoi(row[pixels])
		if err != nil || label < 0 || label >= classes {
			return nil, nil, fmt.Errorf("digits, line %d: label %q is not a digit", i+1, row[pixels])
		}
		all[i].label = label
	}
	if len(all) <= trainCount {
		return nil, nil, fmt.Errorf("only %d digits, expected more than %d", len(all), trainCount)
	}
	return all[:trainCount], all[trainCount:], nil
}

// batchAt returns the indices of the samples of one step: every epoch is a new permutation, which only the seed and the
// epoch decide, so that a resumed run sees exactly what an undisturbed one would have seen.
func batchAt(seed uint64, step, batch, samples int) []int {
	perEpoch := samples / batch
	epoch, within := step/perEpoch, step%perEpoch
	order := rand.New(rand.NewPCG(seed, uint64(epoch)+1)).Perm(samples)
	return order[within*batch : (within+1)*batch]
}
